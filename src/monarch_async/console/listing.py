"""The commands that need no job: which jobs there are, and what this machine offers. And how every command prints what it has found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from monarch_async.console.tables import render
from monarch_async.observe.doctor import doctor
from monarch_async.observe.listing import jobs
from monarch_async.observe.records import to_json

__all__ = ["print_records", "run"]


def run(args: argparse.Namespace) -> int:
    """Run one of them; returns the exit status."""
    if args.command == "jobs":
        print_records(args, jobs(), lambda rows: render("jobs", rows) if rows else "no job runs")
    else:
        print_records(args, doctor(), lambda rows: render("doctor", [row._replace(fix="") if row.ok else row for row in rows]))
    return 0


def print_records(args: argparse.Namespace, value: Any, show: Callable[[Any], str]) -> None:
    """As JSON where that is asked for, else as `show` writes it."""
    print(json.dumps(to_json(value), indent=1) if args.json else show(value))
