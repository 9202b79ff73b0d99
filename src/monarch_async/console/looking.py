"""Runs the commands that look into a job: asks, and prints a table or JSON.

JSON is one value: a list of records, or one record for what there is one of. What goes on (``logs --follow``, ``top``, ``trace``) is one
record a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from monarch_async.console.listing import print_records
from monarch_async.console.tables import render, render_hops, render_stacks, render_tree
from monarch_async.observe.job import Job, attach
from monarch_async.observe.records import to_json

__all__ = ["perform", "run"]

_CLEAR = "\x1b[H\x1b[2J"
CALLS = 3
"""Of each stack that `profile` prints, the innermost."""
_Show = Callable[[Any], str]


def run(args: argparse.Namespace) -> int:
    """Run one of them; returns the exit status."""
    try:
        asyncio.run(_look(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has enough
        sys.stderr.close()
    return 0


async def _look(args: argparse.Namespace) -> None:
    async with attach(args.job, write=args.write, patience=args.patience) as job:
        await perform(job, args)


async def perform(job: Job, args: argparse.Namespace) -> None:
    """Run one of them on a job."""
    await _COMMANDS.get(args.command, _ask)(job, args)


async def _ask(job: Job, args: argparse.Namespace) -> None:
    """What is one question."""
    name, targets = args.command, _targets(args)
    options = {option: getattr(args, option) for option in ("older", "native", "reason", "kind") if hasattr(args, option)}
    print_records(
        args, await getattr(job, name)(*targets, **options), _SHOWN.get(name, lambda rows: render(name, rows) if rows else "none")
    )


def _targets(args: argparse.Namespace) -> Sequence[str]:
    if hasattr(args, "targets"):
        found: Sequence[str] = args.targets
        return found
    return [args.target] if getattr(args, "target", None) else []


async def _top(job: Job, args: argparse.Namespace) -> None:
    shows = sys.stdout.isatty() and not args.json and args.count != 1
    count = args.count or (0 if shows else 1)
    async for rows in job.tops(args.interval):
        if args.json:
            print(json.dumps(to_json(rows)), flush=True)
        else:
            print((_CLEAR if shows else "") + (render("top", rows) if rows else "no actors"), flush=True)
        count -= 1
        if not count:
            return


async def _logs(job: Job, args: argparse.Namespace) -> None:
    await _stream(args, job.logs(args.target, follow=args.follow, grep=args.grep), lambda line: f"[{line.process}] {line.text}")


async def _trace(job: Job, args: argparse.Namespace) -> None:
    await _stream(args, job.trace(args.target, args.max), lambda row: render("trace", [row]).splitlines()[-1])


async def _stream(args: argparse.Namespace, records: AsyncIterator[Any], show: _Show) -> None:
    async for record in records:
        print(json.dumps(to_json(record)) if args.json else show(record), flush=True)


async def _profile(job: Job, args: argparse.Namespace) -> None:
    found = await job.profile(args.target, args.seconds)
    if args.output:
        await asyncio.to_thread(Path(args.output).write_text, found.svg, "utf-8")
    where = f"\nflame graph: {args.output}" if args.output else ""
    head = f"{found.process} (pid {found.pid}), {found.samples} samples by {found.tool}"
    print_records(args, found, lambda profile: "\n".join([head, *_shares(profile.folded)]) + where)


def _shares(folded: str) -> list[str]:
    """The innermost calls, and from where each was called, with their shares of the samples."""
    counted: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, number = line.rpartition(" ")
        counted[" < ".join(stack.split(";")[: -1 - CALLS : -1])] += int(number)
    return [f"{100 * count / counted.total():5.1f} %  {names}" for names, count in counted.most_common(20)]


async def _timeline(job: Job, args: argparse.Namespace) -> None:
    print_records(args, await job.timeline(args.file, args.seconds), _recorded)


def _recorded(found: Any) -> str:
    lost = f", {found.dropped} more were dropped" if found.dropped else ""
    silent = f", {found.silent} did not answer" if found.silent else ""
    where = f"{found.file}: open it at https://ui.perfetto.dev"
    return f"{found.events} events of {found.processes} processes in {found.seconds:g} s{lost}{silent}\n{where}"


async def _bundle(job: Job, args: argparse.Namespace) -> None:
    path = await job.bundle(args.file)
    print_records(args, {"file": str(path)}, lambda found: found["file"])


async def _eval(job: Job, args: argparse.Namespace) -> None:
    print_records(args, await job.eval(args.target, args.expression), lambda rows: render("eval", rows))


def _state(rows: Any) -> str:
    parts = []
    for row in rows:
        lines = [f"{row.actor} in {row.process}", *(f"  {name}: {kind} = {value}" for name, kind, value in row.attributes)]
        parts.append("\n".join([*lines, *([f"  and {row.omitted} more"] if row.omitted else [])]))
    return "\n".join(parts)


def _why(rows: Any) -> str:
    if not rows:
        return "it has not ended"
    lines = []
    for index, row in enumerate(rows):
        lines.append(f"{'' if not index else 'before that: '}{row.subject}: {row.what}")
        lines += [f"    {line}" for line in row.detail.splitlines()]
    return "\n".join(lines)


_SHOWN: dict[str, _Show] = {
    "tree": render_tree,
    "stack": render_stacks,
    "where": render_hops,
    "state": _state,
    "why": _why,
    **dict.fromkeys(("stop", "kill", "restart", "freeze", "thaw"), lambda rows: render("done", rows)),
}
_COMMANDS: dict[str, Callable[[Job, argparse.Namespace], Any]] = {
    "top": _top,
    "logs": _logs,
    "trace": _trace,
    "profile": _profile,
    "bundle": _bundle,
    "timeline": _timeline,
    "eval": _eval,
}
