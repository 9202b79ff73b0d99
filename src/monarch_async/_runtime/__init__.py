"""The only creator of tasks, threads and processes: drives `_core` over `_channel`."""
