"""Every exception of the runtime, sorted by whose fault it is.

Rules:

* *The caller's fault* (a wrong argument, an unknown endpoint, a full queue) is a subclass of the built-in that
  asyncio and Python users expect (`TypeError`, `ValueError`, `TimeoutError`) or of `UsageError`, raised at the call.
* *The other side's fault* (a handler that raised, a process that died, a peer that sent garbage) is an `ActorError`
  or a `ChannelError`: it carries the story from there, as text, so that it can be shown without the remote's classes.
* *Our fault* is an `InternalError`. Seeing one is a bug in this project.

Nothing here imports more than the standard library, so that every layer can raise these.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ActorDied",
    "ActorError",
    "AddressError",
    "AuthenticationError",
    "CallTimeout",
    "ChannelError",
    "ChannelFull",
    "DeadlockError",
    "DecodeError",
    "FrameTooLarge",
    "HandshakeError",
    "InternalError",
    "MonarchError",
    "PortClosed",
    "ProtocolError",
    "ReadOnlyError",
    "SpawnError",
    "SupervisionError",
    "UsageError",
    "VersionMismatch",
]


class MonarchError(Exception):
    """Base of everything this package raises on its own account."""


class InternalError(MonarchError):
    """A broken invariant of the runtime itself: please report it."""


class UsageError(MonarchError):
    """The caller asked for something that can't be: the message says what to do instead."""


class ReadOnlyError(UsageError):
    """A visitor that only looks has asked a job to change something: attach with ``write=True``, or ``--write``."""


class ChannelFull(MonarchError):
    """An un-awaited send went past a hard limit; nothing was sent.

    `limit` is the figure and `option` the name of the setting that raises it.
    """

    def __init__(self, message: str, *, limit: int = 0, option: str = "") -> None:
        super().__init__(message)
        self.limit = limit
        self.option = option


class CallTimeout(MonarchError, TimeoutError):
    """A call's deadline passed before its answer came; the remote handler has been told to stop."""


class DeadlockError(MonarchError):
    """Awaiting this could never end: `chain` lists the handlers that wait for each other, first to last."""

    def __init__(self, message: str, *, chain: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.chain = chain


class SpawnError(MonarchError):
    """A process could not be started, or was refused because its owner is stopping."""


class PortClosed(MonarchError):
    """The receiving side of a port is gone, or every sender of it is."""


class ActorError(MonarchError):
    """An endpoint raised. Also an instance of the original exception's type where that type allows it.

    Attributes:
        type_name: qualified name of the original type, e.g. ``"builtins.KeyError"``.
        text: ``str()`` of the original.
        remote_traceback: the traceback as formatted where it was raised; empty if there was none.
        actor: the display name of the actor that raised.
        errors: for a call on a mesh, what is known per point: ``{point: error}``.
    """

    type_name: str = ""
    text: str = ""
    remote_traceback: str = ""
    actor: str = ""
    errors: Mapping[object, BaseException] = {}

    def __str__(self) -> str:
        if not self.type_name:
            return super().__str__()
        where = f" in {self.actor}" if self.actor else ""
        lines = [f"{self.type_name.removeprefix('builtins.')}: {self.text}{where}"]
        if self.errors:
            lines += fold_errors(self.errors) if len(self.errors) > 1 else []
        if self.remote_traceback:
            lines += ["", "Remote traceback:", self.remote_traceback.rstrip()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<ActorError {self.type_name}: {self.text!r}>" if self.type_name else super().__repr__()


class DecodeError(ActorError):
    """A payload could not be unpickled at the receiving side. Only that message is lost; the link goes on."""


class ActorDied(ActorError):
    """The actor a call was addressed to is gone, was stopped, or never existed.

    Attributes:
        mesh, rank, incarnation: which actor.
        exit_code, signal: how its process ended, where it did (else ``None``).
        started: whether the handler had begun (``None``: unknown).
        reason: the evidence, one line.
    """

    def __init__(
        self,
        message: str = "",
        *,
        mesh: str = "",
        rank: int | None = None,
        incarnation: int = 0,
        exit_code: int | None = None,
        signal: int | None = None,
        started: bool | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.mesh = mesh
        self.rank = rank
        self.incarnation = incarnation
        self.exit_code = exit_code
        self.signal = signal
        self.started = started
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


class SupervisionError(ActorError):
    """A failure in a supervision tree that nobody handled reached the one who is told by this."""


class ChannelError(MonarchError, ConnectionError):
    """A link could not be made or kept."""


class AddressError(ChannelError):
    """An address can't be used. The message lists what was tried and why each was rejected."""


class HandshakeError(ChannelError):
    """The other side did not prove who it is, in time, within the allowed bytes."""


class AuthenticationError(HandshakeError):
    """The other side holds a different key."""


class VersionMismatch(HandshakeError):
    """The other side speaks another version of the protocol."""


class ProtocolError(ChannelError):
    """The peer sent bytes that are no frame of this protocol (the peer's fault)."""


class FrameTooLarge(ChannelError):
    """A message is larger than `max_frame` allows; raised at the sender before anything is sent."""


def _rebuild(cls: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def fold_ranks(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` → ``"0–2,5"``."""
    parts: list[str] = []
    start = previous = None
    for rank in [*sorted(ranks), None]:
        if start is not None and (rank is None or previous is None or rank != previous + 1):
            parts.append(f"{start}" if start == previous else f"{start}–{previous}")
            start = None
        if start is None:
            start = rank
        previous = rank
    return ",".join(parts)


def fold_errors(errors: Mapping[object, BaseException]) -> list[str]:
    """One line per distinct cause, with the points it happened at."""
    causes: dict[str, list[object]] = {}
    for point, error in errors.items():
        name = getattr(error, "type_name", "").removeprefix("builtins.") or type(error).__name__
        text = getattr(error, "text", "") or (str(error.args[0]) if error.args else "")
        causes.setdefault(f"{name}: {text}", []).append(point)
    lines = []
    for cause, points in causes.items():
        ranks = [rank for rank in (getattr(point, "rank", point) for point in points) if isinstance(rank, int)]
        several = "ranks" if len(points) > 1 else "rank"
        where = f"{several} {fold_ranks(ranks)}" if len(ranks) == len(points) else ", ".join(map(str, points))
        lines.append(f"  {where}: {cause}")
    return lines
