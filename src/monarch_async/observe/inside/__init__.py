"""What runs in the processes of a job when somebody looks into it. Loaded then, and not before; see `services`."""
