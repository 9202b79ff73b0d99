"""The processes of a mesh, from its owner's side: as what they were asked for, where each is, and how to ask their agents for something.

Rules: the process of a rank is the last one that was started, or tried; the one before it has ended then. What is said to an agent about
several of its processes is one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from monarch_async._core.events import Evidence
from monarch_async._runtime.asking import ask, tell
from monarch_async._runtime.config import SpawnRequest
from monarch_async._runtime.runtime import Runtime
from monarch_async.ids import ProcAddress

__all__ = ["Processes"]


class Processes:
    """Base of `ProcsLifetime`."""

    def __init__(
        self, runtime: Runtime, requests: Sequence[SpawnRequest], agents: Sequence[ProcAddress], bootstrap: Callable[[], Any] | None
    ) -> None:
        self._runtime = runtime
        self._requests = requests
        self._agents = agents  # of the host of each process
        self._bootstrap = bootstrap
        self._addresses = [request.me for request in requests]
        self._lives = [0] * len(requests)

    def _by_agent(self, ranks: Sequence[int]) -> dict[ProcAddress, list[int]]:
        found: dict[ProcAddress, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._agents[rank], []).append(rank)
        return found

    def _greet(self, address: ProcAddress) -> asyncio.Future[Any]:
        """Ask a process for its first answer, once the bootstrap has run there."""
        if self._bootstrap is not None:
            return ask(self._runtime, address, "bootstrap", self._bootstrap)
        return ask(self._runtime, address, "ping")

    def _tell_given_up(self, agent: ProcAddress, ranks: Sequence[int], evidence: Evidence) -> None:
        tell(self._runtime, agent, "give_up_procs", [self._addresses[rank].uid for rank in ranks], evidence)

    async def _end(self, ranks: Sequence[int], *, returns: bool) -> None:
        timeout = self._runtime.options.stop_timeout
        stops = []
        for agent, theirs in self._by_agent(ranks).items():
            stops.append(ask(self._runtime, agent, "stop_procs", [self._addresses[rank].uid for rank in theirs], timeout, returns))
        await asyncio.gather(*stops, return_exceptions=True)
