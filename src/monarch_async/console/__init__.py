"""The console: a prompt with the runtime at hand (see docs/repl.md)."""
