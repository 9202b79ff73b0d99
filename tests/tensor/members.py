"""Actors that do collective operations, for the tests of this folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from monarch_async import concurrent_endpoint, context, endpoint
from monarch_async.tensor import CollectiveError, TensorActor

__all__ = ["Member", "OverGloo", "cancels", "one_thread"]


def one_thread() -> None:
    """Bootstrap of the processes: there are more of them than CPUs."""
    torch.set_num_threads(1)


class Member(TensorActor):
    """Does what tests say: a function of the member."""

    def __init__(self) -> None:
        self.rank = context().actor_instance.rank.rank
        self.state: dict[str, Any] = {}

    @endpoint
    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(self, *args)
        return await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result

    @concurrent_endpoint
    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(self, *args)
        return await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class OverGloo(Member):
    """One that does not use shared memory, as if the others were on other hosts."""

    comm_backend = "gloo"


async def cancels(member: Member, who: int, count: int) -> Any:
    """A sum that member `who` cancels: what the others are told."""
    future = member.comm.all_reduce(torch.ones(count))
    if member.rank == who:
        future.cancel()
    try:
        await future
    except asyncio.CancelledError:
        return "cancelled"
    except CollectiveError as error:
        return str(error)
    return None
