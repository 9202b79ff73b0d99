"""What is typed at the prompt, as code.

Rules: one input is one statement, or, where several were pasted, all of them; each expression statement is displayed. ``await`` may stand
anywhere; code that has one is a coroutine's. Each input has a file name of its own, and its text stays known to `linecache`, so that
tracebacks show the lines.
"""

from __future__ import annotations

import ast
import codeop
import itertools
import linecache
from types import CodeType

__all__ = ["Compiler"]

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class Compiler:
    """Makes code of inputs. ``from __future__`` statements hold for the inputs after them."""

    def __init__(self) -> None:
        self._command = codeop.CommandCompiler()
        self._command.compiler.flags |= _AWAIT
        self._numbers = itertools.count(1)

    def is_complete(self, source: str) -> bool:
        """Whether this can be run as it is, or is wrong; else more lines have to come."""
        try:
            return self._compile(source, "<input>") is not None
        except (SyntaxError, ValueError, OverflowError):
            return True

    def compile(self, source: str) -> CodeType:
        """The code of a complete input. Raises `SyntaxError`, also for one that is not complete, `ValueError` and `OverflowError`."""
        name = f"<input {next(self._numbers)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = self._compile(source, name)
        return code if code is not None else self._whole(source, name, "single")

    def compile_script(self, source: str, name: str) -> CodeType:
        """The code of a whole file, of which nothing is displayed."""
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        return self._whole(source, name, "exec")

    def _compile(self, source: str, name: str) -> CodeType | None:
        try:
            return self._command(source, name, "single")
        except SyntaxError as error:
            try:
                statements = ast.parse(source, name).body
            except SyntaxError:
                raise error from None
            if len(statements) < 2:
                raise
            code: CodeType = compile(ast.Interactive(statements), name, "single", self._command.compiler.flags, True)
            return code

    def _whole(self, source: str, name: str, mode: str) -> CodeType:
        code: CodeType = compile(source, name, mode, _AWAIT, True)
        return code
