"""What can go wrong when somebody looks into a job."""

from __future__ import annotations

from monarch_async.errors import ChannelError, UsageError

__all__ = ["JobError", "UnknownName"]


class JobError(ChannelError):
    """The job can't be reached: there is none of that name, it has ended, it holds another key, it speaks another version."""


class UnknownName(UsageError):
    """There is no actor or process of that name; `nearest` are those with names like it."""

    def __init__(self, message: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest
