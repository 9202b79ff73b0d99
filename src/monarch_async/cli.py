"""The command line: ``monarch-async COMMAND``.

Exit status: 0 done, 1 what was asked for can't be had now (a port in use), 2 it was asked for wrongly (an option, a key file).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from monarch_async.errors import ChannelError, MonarchError, UsageError
from monarch_async.workers import TLS, run_worker_loop_forever

__all__ = ["main"]

_REPL = "monarch_async.console.repl"
"""Loaded when it is asked for: the command line starts quickly."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "repl":
        return _repl(args)
    try:
        return _worker(args)
    except MonarchError as error:
        print(f"monarch-async {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ChannelError) and not isinstance(error, UsageError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="monarch-async", description="Actors for PyTorch jobs over many processes and hosts.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    repl = commands.add_parser(
        "repl",
        help="a prompt with the runtime at hand",
        description="A Python prompt in a running event loop, with the runtime's names at hand; `await` works there. "
        "`python -m monarch_async` without a command is the same. What is piped in is run as a script.",
    )
    repl.add_argument("--plain", action="store_true", help="do without prompt_toolkit, also where it is installed")
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
    return parser


def _repl(args: argparse.Namespace) -> int:
    status: int = import_module(_REPL).run_repl(plain=args.plain)
    return status


def _worker(args: argparse.Namespace) -> int:
    files = args.tls_cert, args.tls_key, args.tls_ca
    if any(files) and not all(files):
        raise UsageError("TLS needs all of --tls-cert, --tls-key and --tls-ca")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO if args.verbose else logging.WARNING)
    tls = TLS(*files) if all(files) else None
    run_worker_loop_forever(args.listen, args.key_file, advertise=args.advertise, tls=tls, announce=lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
