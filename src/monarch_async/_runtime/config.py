"""What a new process is told: one msgpack map, read before anything else happens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["AgentConfig", "ProcConfig"]


@dataclass(frozen=True, slots=True)
class ProcConfig:
    """For a proc: who it is, whom it works for, and the secret of the job."""

    me: ProcAddress
    agent: ProcAddress
    client: ProcAddress
    key: bytes
    options: Options

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> ProcConfig:
        fields: dict[str, Any] = msgpack.unpackb(data)
        return cls(
            ProcAddress(**fields["me"]),
            ProcAddress(**fields["agent"]),
            ProcAddress(**fields["client"]),
            fields["key"],
            Options(**fields["options"]),
        )


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """For the agent of a client: the client it serves and where its own files are."""

    agent: ProcAddress
    client: ProcAddress
    key: bytes
    options: Options
    directory: str
    sys_path: tuple[str, ...]

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> AgentConfig:
        fields: dict[str, Any] = msgpack.unpackb(data)
        return cls(
            ProcAddress(**fields["agent"]),
            ProcAddress(**fields["client"]),
            fields["key"],
            Options(**fields["options"]),
            fields["directory"],
            tuple(fields["sys_path"]),
        )
