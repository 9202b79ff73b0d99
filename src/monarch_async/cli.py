"""The command line: ``monarch-async COMMAND``.

Exit status: 0 done, 1 what was asked for can't be had now (a port in use, a job that has ended, no permission to change it), 2 it was asked
for wrongly (an option, a key file, a name that does not exist), 130 it was ended by Ctrl-C.

What a command needs is loaded when it is run, so that the help is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from monarch_async.console.arguments import add_commands, seconds
from monarch_async.errors import MonarchError, ReadOnlyError, UsageError

__all__ = ["main"]

_PROMPTS, _WORKER = "monarch_async.console.repl", "monarch_async.console.working"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status: int = import_module(args.module).run(args)
        return status
    except (MonarchError, OSError) as error:  # such as of a file that can't be written
        print(f"monarch-async {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) and not isinstance(error, ReadOnlyError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="monarch-async",
        description="Actors for PyTorch jobs over many processes and hosts.",
        epilog="Exit status: 0 done, 1 not to be had now (no such job, read-only, a port in use), 2 asked for wrongly, 130 Ctrl-C.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    repl = commands.add_parser(
        "repl",
        help="a prompt with the runtime at hand",
        description="A Python prompt in a running event loop, with the runtime's names at hand; `await` works there. "
        "`python -m monarch_async` without a command is the same. What is piped in is run as a script.",
    )
    attach = commands.add_parser(
        "attach",
        help="the same for a job that runs already",
        description="A Python prompt that looks into a running job: its meshes are there by name, and these commands without --job.",
    )
    attach.add_argument("job", metavar="JOB", nargs="?", default="", help="its name, id, pid or file; not needed where only one runs")
    attach.add_argument("--write", action="store_true", help="be allowed to call its actors and to change it; what is done is logged there")
    attach.add_argument("--patience", type=seconds, default=1.0, metavar="S", help="seconds in which each process is to answer (1)")
    for prompt in (repl, attach):
        prompt.add_argument("--plain", action="store_true", help="do without prompt_toolkit, also where it is installed")
        prompt.set_defaults(module=_PROMPTS)
    add_commands(commands)
    worker = commands.add_parser(
        "worker",
        help="wait on this host for jobs to run",
        description="Wait on this host for jobs to run. Programs reach it with attach_to_workers([...], key=...).",
        epilog="Whoever holds the key may run anything here as this user. "
        "A key: (umask 077; head -c 32 /dev/urandom > job.key), copied to every host of the job.",
    )
    worker.add_argument("--listen", required=True, metavar="tcp://HOST:PORT", help="HOST 0.0.0.0 is every interface, PORT 0 a free one")
    worker.add_argument("--key-file", metavar="F", help="the key (mode 0600); may be left out on loopback, for this user's own")
    worker.add_argument("--advertise", default="", metavar="HOST", help="how other hosts reach this one, if not by the HOST it listens on")
    worker.add_argument("--tls-cert", metavar="F", help="PEM: this host's certificate; needs the other two")
    worker.add_argument("--tls-key", metavar="F", help="PEM: its private key")
    worker.add_argument("--tls-ca", metavar="F", help="PEM: who signs the certificates of this job's hosts")
    worker.add_argument("--verbose", action="store_true", help="tell of jobs that come and go")
    worker.set_defaults(module=_WORKER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
