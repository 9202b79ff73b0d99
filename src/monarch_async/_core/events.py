"""What happened to a process or an actor, as plain values that cross processes."""

from __future__ import annotations

import signal as signals
import traceback as traceback_module
from collections.abc import Mapping
from typing import Any, NamedTuple

from monarch_async.errors import ActorDied, SupervisionError, fold_ranks

__all__ = ["Evidence", "Failure", "Identity", "describe_exit", "died"]


class Evidence(NamedTuple):
    """Why something is gone, as far as is known: one line, and the exit code or signal of a process.

    `next` is the uid of the process that is there in its place, or may come to be.
    """

    text: str
    code: int | None = None
    signal: int | None = None
    next: str = ""

    def to_map(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Evidence:
        """From what a peer said; anything malformed in it is left out."""
        code, number, following = fields.get("code"), fields.get("signal"), fields.get("next")
        return cls(
            str(fields.get("text", "gone"))[:2000],
            code if isinstance(code, int) else None,
            number if isinstance(number, int) else None,
            following if isinstance(following, str) else "",
        )


class Identity(NamedTuple):
    """Who an actor is: its mesh, its class, its rank in the mesh at spawn, and which life of it this is."""

    mesh: str
    class_name: str
    rank: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.mesh}[{self.rank}]"


def died(evidence: Evidence, mesh: str, rank: int | None, *, started: bool | None, incarnation: int = 0) -> ActorDied:
    """The error for a caller whose actor is gone."""
    who = f"{mesh}[{rank}]" if rank is not None else mesh
    began = {True: "its handler had started", False: "its handler had not started", None: "its handler may have started"}[started]
    error = ActorDied(
        f"{who} died: {evidence.text} ({began})",
        mesh=mesh,
        rank=rank,
        incarnation=incarnation,
        exit_code=evidence.code,
        signal=evidence.signal,
        started=started,
        reason=evidence.text,
    )
    return error


def describe_exit(code: int | None, signal: int | None) -> str:
    """E.g. ``"killed by signal 9 (SIGKILL)"`` or ``"exited with code 3"``."""
    if signal is not None:
        # Real-time signals other than the first and the last have no name.
        known = {number.value: number.name for number in signals.Signals}
        name = f" ({known[signal]})" if signal in known else ""
        return f"killed by signal {signal}{name}"
    if code is not None:
        return f"exited with code {code}"
    return "gone; how it ended is not known, since its zygote died first"


class Failure(NamedTuple):
    """A failure in a mesh, as its owner is told. Public as `MeshFailure`.

    `mesh` and `class_name` say what failed, `ranks` which members; `endpoint` is where, for an exception, and `process` which, for one that
    ended; `error` and `traceback` tell the exception, `exit_code` and `signal` how a process ended; `meshes` are all meshes that lost a
    member.
    """

    mesh: str
    class_name: str
    ranks: tuple[int, ...]
    reason: str
    endpoint: str = ""
    process: str = ""
    incarnation: int = 0
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    traceback: str = ""
    meshes: tuple[str, ...] = ()

    @classmethod
    def of_actor(cls, identity: Identity, error: BaseException, endpoint: str) -> Failure:
        """An actor failed of an exception."""
        story = "".join(traceback_module.format_exception(error))
        return cls(
            mesh=identity.mesh,
            class_name=identity.class_name,
            ranks=(identity.rank,),
            reason=f"{type(error).__name__} in {endpoint}: {error}"[:10_000],
            endpoint=endpoint,
            incarnation=identity.incarnation,
            error=f"{type(error).__module__}.{type(error).__qualname__}",
            traceback=story[-65_536:],
            meshes=(identity.mesh,),
        )

    @classmethod
    def of_proc(cls, member: Identity, meshes: tuple[str, ...], process: str, evidence: Evidence) -> Failure:
        """A process ended, and `member` with it."""
        return cls(
            mesh=member.mesh,
            class_name=member.class_name,
            ranks=(member.rank,),
            reason=f"process {process} {evidence.text}",
            process=process,
            incarnation=member.incarnation,
            exit_code=evidence.code,
            signal=evidence.signal,
            meshes=meshes,
        )

    @property
    def member(self) -> str:
        """Which members, e.g. ``"trainer[0–3]"``."""
        return f"{self.mesh}[{fold_ranks(list(self.ranks))}]"

    def __str__(self) -> str:
        who = f"{self.class_name} " if self.class_name else ""
        return f"{who}{self.member} failed: {self.reason}"

    def report(self) -> str:
        """The whole story, several lines."""
        lines = [str(self)]
        if len(self.meshes) > 1:
            lines.append(f"  meshes that lost a member: {', '.join(self.meshes)}")
        if self.traceback:
            lines += ["", self.traceback.rstrip()]
        return "\n".join(lines)

    def as_error(self) -> SupervisionError:
        """For raising."""
        return SupervisionError(self.report())
