"""Short commands at the prompt: ``ps``, ``stack 3``, ``logs trainer --follow``.

Theory: a line is a command if its first word is the name of one, what follows could not be Python's next word (``ps = 1`` and ``ps.x`` are
Python), and the session has not given that name another meaning. A command is a method of `Job`: its words are the method's arguments,
``--name value`` those by keyword, as the method's signature has them. What it returns is shown as a table.

The same names are functions in the session, as far as they are not Python's own: ``rows = await ps()`` gives the records.
"""

from __future__ import annotations

import builtins
import inspect
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_async.console.show import format_value, table
from monarch_async.errors import UsageError
from monarch_async.observe.job import Job

__all__ = ["COMMANDS", "Commands", "show_records"]

_READS = ("ps", "procs", "tree", "top", "calls", "where", "stack", "links", "deadletters", "why", "events", "logs", "state", "bundle")
_WRITES = ("stop", "kill", "restart", "freeze", "thaw", "eval", "trace", "profile")
COMMANDS = _READS + _WRITES
"""The methods of `Job` that are commands."""

Run = Callable[[], Awaitable[None]]

_LINE = re.compile(r"\s*([a-z]+)(?:\s+(?!(?:in|is|and|or|not|if|for)\b)([\w'\"\-/.~].*))?$", re.DOTALL)
_COUNT_OF_PYTHON = re.compile(r"-\s")


class Commands:
    """The commands of a session on `job`. `more` are commands of the session's own, which get the words after their name."""

    def __init__(
        self,
        job: Callable[[], Job],
        write: Callable[[str], object],
        more: Mapping[str, Callable[[Sequence[str]], Awaitable[None]]],
    ) -> None:
        self._job = job
        self._write = write
        self._more = dict(more)
        self._functions = {name: self._function(name) for name in COMMANDS if not hasattr(builtins, name)}

    @property
    def names(self) -> list[str]:
        return sorted({*COMMANDS, *self._more})

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What the session has by these names."""
        return dict(self._functions)

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._job(), name)(*args, **kwargs)

        method = getattr(Job, name)
        function.__name__ = function.__qualname__ = name
        function.__doc__ = method.__doc__
        signature = inspect.signature(method)
        function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return function

    def find(self, source: str, namespace: Mapping[str, Any]) -> Run | None:
        """What to run for an input that is a command; `None` if it is Python."""
        match = _LINE.match(source)
        if match is None or (match[2] and _COUNT_OF_PYTHON.match(match[2])):
            return None
        name, rest = match[1], match[2] or ""
        if name not in self._more and name not in COMMANDS:
            return None
        if name in namespace and namespace[name] is not self._functions.get(name):
            return None
        return lambda: self._run(name, rest)

    async def _run(self, name: str, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from None
        if name in self._more:
            await self._more[name](words)
            return
        method = getattr(self._job(), name)
        args, kwargs = read_words(name, method, words, rest)
        result = method(*args, **kwargs)
        if isinstance(result, AsyncIterator):
            async for record in result:
                self._write(_line(record))
        else:
            self._write(show_records(await result))


def read_words(name: str, method: Callable[..., Any], words: Sequence[str], rest: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a method, from the words of a command. Raises `UsageError`, which says how it is used."""
    signature = inspect.signature(method)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    ahead = list(words)
    while ahead:
        word = ahead.pop(0)
        if not word.startswith("--"):
            args.append(int(word) if word.isdigit() else word)
            continue
        option = word[2:].replace("-", "_")
        parameter = signature.parameters.get(option)
        if parameter is None:
            raise UsageError(f"{name} has no option {word}; {usage(name, method)}")
        if parameter.default is False:
            kwargs[option] = True
        elif not ahead:
            raise UsageError(f"{word} needs a value; {usage(name, method)}")
        else:
            kwargs[option] = _as_default(ahead.pop(0), parameter.default)
    if name == "eval" and len(args) > 2:  # the expression may have spaces
        target = shlex.split(rest)[0]
        args = [args[0], rest[rest.index(target) + len(target) :].strip()]
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        raise UsageError(usage(name, method)) from None
    return args, kwargs


def usage(name: str, method: Callable[..., Any]) -> str:
    """``usage: stack TARGET [--native]``."""
    parts = []
    for parameter in inspect.signature(method).parameters.values():
        word = parameter.name.upper()
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"[{word.removesuffix('S')} …]")
        elif parameter.default is parameter.empty:
            parts.append(word)
        else:
            option = f"--{parameter.name.replace('_', '-')}"
            parts.append(f"[{option}]" if parameter.default is False else f"[{option} {word}]")
    return " ".join(["usage:", name, *parts])


def _as_default(word: str, default: Any) -> Any:
    if isinstance(default, (int, float)):
        try:
            return type(default)(word)
        except ValueError:
            raise UsageError(f"{word!r} is no number") from None
    return word


def show_records(result: Any) -> str:
    """Records as a table, without the columns in which nobody has anything."""
    if isinstance(result, Path):
        return str(result)
    records = result if isinstance(result, list) else [result]
    if not records:
        return "none"
    if not all(isinstance(record, tuple) and hasattr(record, "_fields") for record in records):
        return format_value(result)
    fields = [name for name in records[0]._fields if any(getattr(record, name) not in (None, "", ()) for record in records)]
    long = [name for name in fields if name in ("text", "detail", "folded", "svg")]
    fields = [name for name in fields if name not in ("uid", "host", *long)] + [name for name in long if name in ("text", "detail")]
    depth = "depth" in fields
    if depth:
        fields.remove("depth")
    rows = [[_cell(getattr(record, name)) for name in fields] for record in records]
    if depth:
        for record, row in zip(records, rows, strict=True):
            row[0] = "  " * record.depth + row[0]
    return table([name.replace("_", " ") for name in fields], rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value).rstrip()


def _line(record: Any) -> str:
    return "  ".join(_cell(field) for field in record)
