"""Restarts on another host: what runs there behind a worker comes back there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_async import MeshFailure, Restart, attach_to_workers, configure, shutdown, this_host
from monarch_async.options import Options
from tests.api.restarting import Member, back
from tests.hosts.workers import make_key, worker
from tests.runtime.agents import wait_gone


@pytest.mark.parametrize("policy", ["of the processes", "of the actors"])
async def test_processes_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """They are started again there, references held here and there stay valid, and nothing is left at the end."""
    failures: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", failures.append)
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        there = attach_to_workers([url], key=key)
        of_procs, of_actors = (Restart(), None) if policy == "of the processes" else (None, Restart())
        procs = there.spawn_procs({"gpus": 2}, name="there", restart=of_procs)
        members: Any = procs.spawn("members", Member) if of_actors is None else procs.spawn("members", Member, restart=of_actors)
        here = this_host().spawn_procs().spawn("here", Member)
        first = members.slice(hosts=0, gpus=0)
        assert 1 == await here.ask.call_one(first, 1)
        pids = [pid for pid, _ in (await members.life.call()).values()]
        for life in range(1, 3):
            pid, _ = await first.life.call_one()
            os.kill(pid, signal.SIGKILL)
            pids.append(await back(first, life))
        assert 1 == await here.ask.call_one(first, 1)
        assert [2, 1] == list((await members.add.call()).values())
        assert [] == failures
        await shutdown()
        await wait_gone(pids)


async def test_a_tree_on_another_host(tmp_path: Path) -> None:
    """More members than are reached one by one: calls and broadcasts through the agent there reach the lives that are there."""
    before = Options()
    configure(fan_out=2)
    try:
        key = make_key(tmp_path)
        with worker("--key-file", key) as (url, _):
            there = attach_to_workers([url], key=key)
            members = there.spawn_procs({"gpus": 4}, restart=Restart()).spawn("members", Member)
            pids = [pid for pid, _ in (await members.life.call()).values()]
            for life in range(1, 3):
                members.add.broadcast()
                pids[1] = (await members.slice(hosts=0, gpus=1).life.call_one())[0]
                os.kill(pids[1], signal.SIGKILL)
                await back(members.slice(hosts=0, gpus=1), life)
                assert [life, 0, life, life] == list((await members.add.call(0)).values())
            await shutdown()
    finally:
        configure(fan_out=before.fan_out)


async def test_processes_that_go_along_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped to be started again says goodbye on its links, which is not the end of what follows it."""
    failures: list[MeshFailure] = []
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", failures.append)
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        there = attach_to_workers([url], key=key)
        members = there.spawn_procs({"gpus": 2}, restart=Restart(strategy="one_for_all")).spawn("members", Member)
        pids = [pid for pid, _ in (await members.life.call()).values()]
        os.kill(pids[0], signal.SIGKILL)
        pids += [await back(members.slice(hosts=0, gpus=rank), 1) for rank in range(2)]
        assert [1, 1] == list((await members.add.call()).values())
        assert [] == failures
        await shutdown()
        await wait_gone(pids)
