"""Runs ``monarch-async worker``."""

from __future__ import annotations

import argparse
import logging

from monarch_async.errors import UsageError
from monarch_async.workers import TLS, run_worker_loop_forever

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Be a worker until told to end. Raises `UsageError` for options that don't go together, and what `run_worker_loop_forever` does."""
    files = args.tls_cert, args.tls_key, args.tls_ca
    if any(files) and not all(files):
        raise UsageError("TLS needs all of --tls-cert, --tls-key and --tls-ca")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO if args.verbose else logging.WARNING)
    tls = TLS(*files) if all(files) else None
    run_worker_loop_forever(args.listen, args.key_file, advertise=args.advertise, tls=tls, announce=lambda line: print(line, flush=True))
    return 0
