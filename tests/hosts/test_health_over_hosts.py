"""The health of processes on several hosts: each host's agent answers for its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from monarch_async import Actor, ProcState, attach_to_workers, endpoint
from tests.hosts.workers import make_key, worker


class Worker(Actor):
    """Says who it is, or blocks."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def spin(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass


async def test_each_host_answers_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is stuck, one is frozen; when a host is lost, its process is unreachable and the other's state is still told."""
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", lambda failure: None)
    key = make_key(tmp_path)
    with worker("--key-file", key) as (one, _), worker("--key-file", key) as (two, second):
        procs = attach_to_workers([one, two], key=key).spawn_procs()
        workers = procs.spawn("workers", Worker)
        pids = list((await workers.pid.call()).values())
        call = workers.slice(hosts=0).spin.call_one()

        async def states_are(*wanted: ProcState) -> None:
            async with asyncio.timeout(10):
                while [*wanted] != [health.state for health in (await procs.health()).values()]:  # noqa: ASYNC110  # no event tells it
                    await asyncio.sleep(0.01)

        await states_are(ProcState.STUCK, ProcState.READY)
        os.kill(pids[1], signal.SIGSTOP)
        await states_are(ProcState.STUCK, ProcState.FROZEN)
        async with asyncio.timeout(10):
            stuck = (await procs.slice(hosts=0).health()).item()
            while not stuck.place:  # it is looked for once the process is known to be stuck
                await asyncio.sleep(0.01)
                stuck = (await procs.slice(hosts=0).health()).item()
        assert ("workers[0].spin", pids[0]) == (stuck.place, stuck.pid)
        second.kill()
        await states_are(ProcState.STUCK, ProcState.UNREACHABLE)
        call.cancel()
        os.kill(pids[0], signal.SIGKILL)  # else the end waits for it
        await states_are(ProcState.FAILED, ProcState.UNREACHABLE)
