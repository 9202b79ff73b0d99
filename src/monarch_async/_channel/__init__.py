"""The only sockets and shared memory of the project."""
