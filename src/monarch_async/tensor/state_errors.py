"""What can be wrong with a published state dict, or with what it shall be pulled into."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_async.errors import MonarchError

__all__ = ["PublisherGone", "StateMismatch"]

_SHOWN = 20


class PublisherGone(MonarchError):
    """Who published a state dict has ended, and has not published it again. `name` is that of the state dict, `publisher` who it was."""

    def __init__(self, message: str = "", *, name: str = "", publisher: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.publisher = publisher


class StateMismatch(MonarchError, ValueError):
    """What is published and what it shall be pulled into don't fit. Nothing was written. `problems` has one line for each."""

    def __init__(self, message: str = "", problems: Sequence[str] = ()) -> None:
        lines = [message, *(f"  {line}" for line in problems[:_SHOWN])]
        if len(problems) > _SHOWN:
            lines.append(f"  and {len(problems) - _SHOWN} more")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return _mismatch, (str(self), self.problems)


def _mismatch(text: str, problems: tuple[str, ...]) -> StateMismatch:
    error = StateMismatch(text)
    error.problems = problems
    return error
