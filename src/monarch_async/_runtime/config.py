"""What a new process is told: one msgpack map, read before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import msgpack

from monarch_async._channel.tls import TLS
from monarch_async._runtime.pulse import NO_SLOT
from monarch_async.ids import ProcAddress
from monarch_async.options import Options

__all__ = ["AgentConfig", "Network", "ProcConfig", "SpawnRequest"]


class Network(NamedTuple):
    """How links between hosts are secured: the key that both ends hold, and TLS where it is wanted."""

    key: bytes
    tls: TLS | None = None

    def to_map(self) -> dict[str, Any]:
        return {"key": self.key, "tls": self.tls.to_map() if self.tls is not None else None}

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(self.to_map())
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls.from_map(msgpack.unpackb(data))

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Self:
        return cls(fields["key"], TLS(**fields["tls"]) if fields["tls"] else None)


def _pack(config: ProcConfig | AgentConfig) -> bytes:
    """The record as a map of plain maps and values."""
    fields = config._asdict()
    for name, value in fields.items():
        if isinstance(value, Network):
            fields[name] = value.to_map()
        elif isinstance(value, ProcAddress | Options):
            fields[name] = value._asdict()
    packed: bytes = msgpack.packb(fields)
    return packed


class ProcConfig(NamedTuple):
    """For a proc: who it is, whom it works for, the secret of its host, and that of the network once the job has other hosts.

    `slot` is its place on the page of `pulse`.
    """

    me: ProcAddress
    agent: ProcAddress
    client: ProcAddress
    key: bytes
    network: Network | None
    options: Options
    slot: int = NO_SLOT

    def pack(self) -> bytes:
        return _pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        fields: dict[str, Any] = msgpack.unpackb(data)
        return cls(
            ProcAddress(**fields["me"]),
            ProcAddress(**fields["agent"]),
            ProcAddress(**fields["client"]),
            fields["key"],
            Network.from_map(fields["network"]) if fields["network"] else None,
            Options(**fields["options"]),
            fields["slot"],
        )


class AgentConfig(NamedTuple):
    """For an agent: the client it serves, which process started it, where its own files are.

    Its import path is the starter's or the worker's.
    """

    agent: ProcAddress
    client: ProcAddress
    key: bytes
    network: Network | None
    options: Options
    directory: str
    sys_path: tuple[str, ...]
    parent: int

    def pack(self) -> bytes:
        return _pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        fields: dict[str, Any] = msgpack.unpackb(data)
        return cls(
            ProcAddress(**fields["agent"]),
            ProcAddress(**fields["client"]),
            fields["key"],
            Network.from_map(fields["network"]) if fields["network"] else None,
            Options(**fields["options"]),
            fields["directory"],
            tuple(fields["sys_path"]),
            fields["parent"],
        )


class SpawnRequest(NamedTuple):
    """One process to start, as asked for over a link."""

    me: ProcAddress
    size: int
    owner: ProcAddress
    env: Mapping[str, str | None]
    cwd: str | None
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]
    cpus: frozenset[int] | None
    kill_stuck: bool = False  # after the option `stuck_kill_after`
    returns: bool = False  # when it ends, its owner may start a successor
