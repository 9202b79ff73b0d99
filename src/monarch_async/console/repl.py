"""``monarch-async repl``: the prompt, from its first line to the end of the job.

The loop is one of asyncio's own, made by `asyncio.Runner`: at the end what is left in it is cancelled, which ends the job.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from monarch_async.console.commands import Commands
from monarch_async.console.debugger import Debugging, PdbCommand, Processes
from monarch_async.console.prompts import PlainPrompt
from monarch_async.console.session import Session
from monarch_async.console.show import describe_error, format_error
from monarch_async.debugging import known_processes
from monarch_async.ids import ProcAddress
from monarch_async.observe.job import Job

__all__ = ["run_repl"]

_TOOLKIT = "monarch_async.console.toolkit"


def run_repl(*, plain: bool = False) -> int:
    """Be a REPL on the terminal until it ends; returns the exit status. What is piped in is run as a script.

    `plain` does without `prompt_toolkit`, also where it is installed.
    """
    session = Session(names_at_hand())
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")  # modules beside the user, as for any REPL
    if not sys.stdin.isatty():
        return drive(session, lambda: _script(session))
    sys.ps1 = ">>> "  # tells others that this is an interactive program
    return drive(session, lambda: _interact(session, plain))


def names_at_hand() -> dict[str, Any]:
    """The public names, and asyncio."""
    package = sys.modules["monarch_async"]
    return {"__name__": "__main__", "asyncio": asyncio, **{name: getattr(package, name) for name in package.__all__}}


def drive(session: Session, main: Callable[[], Any]) -> int:
    """Run the coroutine that `main` makes in a new loop, with the session installed; Ctrl-C ends it in no case."""
    with asyncio.Runner() as runner, session.installed():
        loop = runner.get_loop()
        loop.set_exception_handler(_report)
        task: asyncio.Task[int] = loop.create_task(main(), name="console")
        while True:
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:
                if task.done():
                    raise


async def _script(session: Session) -> int:
    went_well = await session.run_script(sys.stdin.read(), "<stdin>")
    return session.status if session.status is not None else int(not went_well)


def add_commands(session: Session, job: Callable[[], Job], processes: Processes) -> None:
    """Have short commands for `job`; `processes` are those in which handlers may have stopped."""

    def enter(mode: Debugging) -> None:
        session.mode = mode

    session.commands = commands = Commands(job, session.write, {"pdb": PdbCommand(processes, session.write, enter)})
    session.namespace.update(commands.functions)


async def _processes() -> list[ProcAddress]:
    return known_processes()


async def _interact(session: Session, plain: bool) -> int:
    print(banner())
    add_commands(session, Job.here, _processes)
    prompt = make_prompt(session, plain=plain)
    try:
        return await session.interact(prompt)
    finally:
        prompt.close()


def make_prompt(session: Session, *, plain: bool) -> Any:
    """The prompt with all comfort where it can be had."""
    if plain or os.environ.get("TERM") == "dumb" or importlib.util.find_spec("prompt_toolkit") is None:
        return PlainPrompt(session)
    return import_module(_TOOLKIT).ToolkitPrompt(session)


def banner() -> str:
    """What stands above the first prompt."""
    return (
        f"monarch_async {metadata.version('monarch-async')}, Python {platform.python_version()}: the runtime's names are at hand.\n"
        "`await` works at the prompt. Ctrl-C cancels what runs, Ctrl-D ends the job and the session."
    )


def _report(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """An error in the loop that nobody sees otherwise."""
    error = context.get("exception")
    if isinstance(error, BaseException) and "never retrieved" in str(context.get("message")):
        print(f"an error that nobody awaited: {describe_error(error)}", file=sys.stderr)
    elif isinstance(error, BaseException):
        print(f"{context.get('message')}\n{format_error(error)}", file=sys.stderr)
    else:
        loop.default_exception_handler(dict(context))
