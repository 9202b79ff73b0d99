"""The console: a prompt with the runtime at hand (see docs/repl.md), and the commands that look into a job (docs/console.md)."""
