"""``monarch-async repl`` and ``attach``: the prompt, from its first line to its end.

The loop is one of asyncio's own, made by `asyncio.Runner`: at the end what is left in it is cancelled, which ends the job that the session
has started. A job that was attached to is left as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

from monarch_async.ambient import configure
from monarch_async.console.commands import Commands, Own
from monarch_async.console.debugger import Debugging, PdbCommand
from monarch_async.console.prompts import PlainPrompt
from monarch_async.console.session import Session
from monarch_async.console.show import describe_error, format_error
from monarch_async.observe.job import Job, attach
from monarch_async.observe.names import parse

__all__ = ["run"]

_TOOLKIT = "monarch_async.console.toolkit"


def run(args: argparse.Namespace) -> int:
    """Be a prompt on the terminal until it ends; returns the exit status. What is piped in is run as a script."""
    session = Session(names_at_hand())
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # modules beside the user, as for any prompt
    if sys.stdin.isatty():
        sys.ps1 = ">>> "  # tells others that this is an interactive program
    return drive(session, lambda: _attached(session, args) if args.command == "attach" else _own(session, args))


def names_at_hand() -> dict[str, Any]:
    """The public names, and asyncio."""
    package = sys.modules["monarch_async"]
    return {"__name__": "__main__", "asyncio": asyncio, **{name: getattr(package, name) for name in package.__all__}}


def drive(session: Session, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run the coroutine that `main` makes in a new loop, with the session installed; Ctrl-C ends it in no case."""
    with asyncio.Runner() as runner, session.installed():
        loop = runner.get_loop()
        loop.set_exception_handler(_report)
        task = loop.create_task(main(), name="console")
        while True:
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                if task.done():
                    raise


async def _own(session: Session, args: argparse.Namespace) -> int:
    """A job of the session's own, which starts with the first process."""
    configure(debug=True)
    add_commands(session, Job.here)
    return await _interact(
        session,
        args,
        f"monarch_async, Python {platform.python_version()}: the runtime's names are at hand, and `await` works at the prompt.\n"
        "Ctrl-C cancels what runs, Ctrl-D ends the job and the session. `ps`, `tree`, `stack 0`, `pdb` … look into the job.",
    )


async def _attached(session: Session, args: argparse.Namespace) -> int:
    """Somebody else's job."""
    async with attach(args.job, write=args.write, patience=args.patience) as job:
        meshes = await references(job)
        session.namespace.update({"job": job, **meshes})

        async def refresh(words: Sequence[str]) -> None:
            """``meshes``: names for those that are there now."""
            found = await references(job)
            session.namespace.update(found)
            session.write(", ".join(found) or "none")

        add_commands(session, lambda: job, {"meshes": refresh})
        rights = "its actors can be called and it can be changed, which is logged there" if args.write else "read-only"
        return await _interact(
            session,
            args,
            f"attached to {job.name} ({job.id}), {rights}.\n"
            f"Its meshes: {', '.join(meshes) or 'none'}. `ps`, `tree`, `stack 0`, `logs`, … look into it; Ctrl-D leaves it as it is.",
        )


async def references(job: Job) -> dict[str, Any]:
    """The meshes of actors that live, by their names."""
    names = sorted({parse(row.actor)[0] for row in await job.ps()})
    return {name: await job.reference(name) for name in names if name.isidentifier()}


def add_commands(session: Session, job: Callable[[], Job], own: Mapping[str, Own] | None = None) -> None:
    """Have short commands that look into `job`, and these."""

    def enter(mode: Debugging) -> None:
        session.mode = mode

    session.commands = commands = Commands(job, {"pdb": PdbCommand(job, session.write, enter), **(own or {})})
    session.namespace.update(commands.functions)


async def _interact(session: Session, args: argparse.Namespace, banner: str) -> int:
    if not sys.stdin.isatty():
        went_well = await session.run_script(sys.stdin.read(), "<stdin>")
        return session.status if session.status is not None else int(not went_well)
    print(banner)
    prompt = _make_prompt(session, plain=args.plain)
    try:
        return await session.interact(prompt)
    finally:
        prompt.close()


def _make_prompt(session: Session, *, plain: bool) -> Any:
    """The prompt with all comfort where it can be had."""
    if plain or os.environ.get("TERM") == "dumb" or importlib.util.find_spec("prompt_toolkit") is None:
        return PlainPrompt(session)
    return import_module(_TOOLKIT).ToolkitPrompt(session)


def _report(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """An error in the loop that nobody sees otherwise."""
    error = context.get("exception")
    if isinstance(error, BaseException) and "never retrieved" in str(context.get("message")):
        print(f"an error that nobody awaited: {describe_error(error)}", file=sys.stderr)
    elif isinstance(error, BaseException):
        print(f"{context.get('message')}\n{format_error(error)}", file=sys.stderr)
    else:
        loop.default_exception_handler(dict(context))
