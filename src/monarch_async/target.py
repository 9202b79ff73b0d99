"""The members that a mesh addresses, as sending to them needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_async._runtime.lane import Lane
from monarch_async._runtime.local import LocalLane
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.runtime import Runtime
from monarch_async.shape import Shape

__all__ = ["Target"]


class Target:
    """The members that a mesh addresses, as sending needs them: their lanes, and what tells each its position."""

    __slots__ = ("groups", "lanes", "name", "ranks", "runtime", "shape")

    def __init__(self, runtime: Runtime, name: str, shape: Shape, lanes: list[Lane | LocalLane], ranks: list[Any]) -> None:
        self.runtime = runtime
        self.name = name
        self.shape = shape
        self.lanes = lanes
        self.ranks = ranks
        self.groups = _groups(runtime, lanes) if len(lanes) > runtime.options.fan_out else ()


def _groups(runtime: Runtime, lanes: Sequence[Lane | LocalLane]) -> list[tuple[Peer, list[int]]]:
    """The members that are reached through the agent of their host, by that agent: where there are several."""
    by_host: dict[str, list[int]] = {}
    for index, lane in enumerate(lanes):
        if isinstance(lane, Lane):
            host = lane.peer.address.host
            if host != runtime.me.host or runtime.options.fan_out_local:
                by_host.setdefault(host, []).append(index)
    groups = []
    for indices in by_host.values():
        lane = lanes[indices[0]]
        if len(indices) > 1 and isinstance(lane, Lane):
            groups.append((runtime.tree.agent_of(lane), indices))
    return groups
