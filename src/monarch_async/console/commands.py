"""Short commands at the prompt: ``ps``, ``stack 3``, ``logs trainer --follow``.

A line is a command if its first word is the name of one, what follows could not be Python's next word (``ps = 1`` and ``ps.x`` are Python),
and the session has not given that name another meaning. It is read and carried out as on the command line, but for the job, which is the
session's. The same names are functions in the session, as far as they are not Python's own: ``rows = await ps()`` gives the records.
"""

from __future__ import annotations

import argparse
import builtins
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from monarch_async.console.arguments import READS, WRITES, add_commands
from monarch_async.console.looking import perform
from monarch_async.errors import UsageError
from monarch_async.observe.job import Job

__all__ = ["Commands", "Own"]

_NAMES = (*READS, *WRITES)
_LINE = re.compile(r"\s*([a-z]+)(?:\s+(?!(?:in|is|and|or|not|if|for|else)\b)([\w'\"\-/.~].*))?\s*$", re.DOTALL)
_REMARK = re.compile(r"(?:^|\s)#.*")
_PYTHON = re.compile(r"-\s|-?\d+\s*[-+*/%<>=]")
"""What follows a name in Python, though it could be a command's word."""

Own = Callable[[Sequence[str]], Awaitable[None]]


class Commands:
    """The commands of a session on `job`. `own` are those that only a session has; they get the words after their name."""

    def __init__(self, job: Callable[[], Job], own: Mapping[str, Own]) -> None:
        self._job = job
        self._own = dict(own)
        self.functions = {name: self._function(name) for name in _NAMES if not hasattr(builtins, name)}
        self._parser = _Parser(prog="", add_help=False)
        add_commands(self._parser.add_subparsers(dest="command", parser_class=_Parser))

    @property
    def names(self) -> list[str]:
        return sorted({*_NAMES, *self._own})

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._job(), name)(*args, **kwargs)

        function.__name__ = function.__qualname__ = name
        function.__doc__ = getattr(Job, name).__doc__
        return function

    def find(self, source: str, namespace: Mapping[str, Any]) -> Callable[[], Awaitable[None]] | None:
        """What to run for an input that is a command; `None` if it is Python."""
        match = _LINE.match(_REMARK.sub("", source))
        if match is None or "\n" in source.strip() or (match[2] and _PYTHON.match(match[2])):
            return None
        name, rest = match[1], match[2] or ""
        if name not in self._own and name not in _NAMES:
            return None
        if name in namespace and namespace[name] is not self.functions.get(name):
            return None
        return lambda: self._run(name, rest)

    async def _run(self, name: str, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from None
        if name in self._own:
            await self._own[name](words)
            return
        if name == "eval" and len(words) > 2:  # an expression may have spaces
            words = [words[0], rest.partition(words[0])[2].strip(" '\"")]
        try:
            args = self._parser.parse_args([name, *words])
        except SystemExit:
            return  # its help was shown
        await perform(self._job(), args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {' '.join(self.format_usage().split())}")
