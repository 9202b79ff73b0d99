"""A timeline of a running job: who called whom when, in all processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from monarch_async import MeshFailure, attach_to_workers, configure, shutdown, this_host
from monarch_async.ambient import current_runtime
from monarch_async.observe.inside import recording
from monarch_async.observe.inside.layers import layers_of
from monarch_async.observe.inside.recording import record
from monarch_async.observe.job import Job
from monarch_async.observe.metrics.serving import serve_metrics
from monarch_async.observe.records import Recorded
from monarch_async.observe.timeline import record as record_all
from tests.hosts.workers import make_key, worker
from tests.observe.meters import scrape_all, values
from tests.observe.trace_format import names_of, wrong_in
from tests.observe.working import Worker, settled


async def recorded(path: Path, seconds: float, during: Any) -> tuple[Recorded, dict[str, Any]]:
    """The answer and the trace of a recording, while which something is done again and again."""
    job = Job.here(patience=5.0)
    task = asyncio.ensure_future(job.timeline(path, seconds))
    while not task.done():
        await during()
        await asyncio.sleep(0.02)
    return await task, json.loads(path.read_text())


async def test_calls_flow_through_processes(tmp_path: Path, failures: list[MeshFailure]) -> None:
    """A process for each rank, a track for each actor, flows from call to handler over two hops, counters; by the format's rules."""
    procs = this_host().spawn_procs({"gpus": 2}, name="gpus")
    workers: Any = procs.spawn("workers", Worker)
    await workers
    await settled(procs)
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    once = asyncio.Event()

    async def during() -> None:
        await first.ask.call_one(second, 0.001)
        await second.block.call_one(0.002)
        if not once.is_set() and await first.is_watched.call_one():
            once.set()
            failing: Any = procs.spawn("failing", Worker)
            await failing.slice(gpus=0).fail.broadcast()

    answer, trace = await recorded(tmp_path / "out.json", 1.5, during)
    assert [] == wrong_in(trace)
    assert str(tmp_path / "out.json") == answer.file
    assert (4, 0, 0) == (answer.processes, answer.dropped, answer.silent)
    assert [f"client ({os.uname().nodename}, pid {os.getpid()})", "gpus[0]", "gpus[1]", "agent"] == [
        name if name.startswith("client") else name.split(" ")[0] for name in names_of(trace, "process_name").values()
    ]
    threads = names_of(trace, "thread_name")
    slices = [(threads[event["pid"], event["tid"]], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {("workers[0]", "workers[0].ask"), ("workers[1]", "workers[1].step"), ("workers[1]", "workers[1].block")} <= set(slices)
    assert ("program", "call workers[0].ask") in slices
    starts = {event["id"]: threads[event["pid"], event["tid"]] for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: threads[event["pid"], event["tid"]] for event in trace["traceEvents"] if event["ph"] == "f"}
    assert answer.flows == len(starts)
    assert {("program", "workers[0]"), ("workers[0]", "workers[1]"), ("program", "workers[1]")} <= {
        (starts[number], ends[number]) for number in starts
    }
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert {"mailbox messages", "link bytes queued", "loop lag (ms)", "handlers ended"} == counters
    assert any(event["name"].startswith("failed: failing[0]") for event in trace["traceEvents"] if event["ph"] == "i")
    assert [False, False] == list((await workers.is_watched.call()).values())
    assert {} == current_runtime().parts["recorders"]


async def test_who_does_not_answer_is_in_the_picture(tmp_path: Path) -> None:
    """With its state; a handler that is not over is a slice up to the end, also if it was begun before."""
    procs, others = this_host().spawn_procs(name="procs"), this_host().spawn_procs(name="others")
    worker: Any = procs.spawn("worker", Worker)
    other: Any = others.spawn("other", Worker)
    await other
    await worker.step.call_one()
    await settled(procs, others)
    call = worker.step.call_one(60)
    os.kill((await others.health()).item().pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        while "frozen" != (await others.health()).item().state:
            await asyncio.sleep(0.02)
    answer, trace = await recorded(tmp_path / "out.json", 0.3, lambda: asyncio.sleep(0))
    assert [] == wrong_in(trace)
    assert answer.silent >= 1
    slices = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert slices["frozen"]["dur"] >= 0.2e6  # in microseconds
    assert "unfinished" == slices["worker[0].step"]["args"]["outcome"]
    os.kill((await others.health()).item().pid, signal.SIGCONT)
    call.cancel()


async def test_what_there_is_no_room_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is dropped, and told; pages end; two recordings go on side by side, and are ended in any order."""
    monkeypatch.setattr(recording, "KEPT", 20)
    monkeypatch.setattr(recording, "PAGE", 8)
    procs = this_host().spawn_procs(name="procs")
    await procs
    runtime = current_runtime()
    before = runtime.requests
    first, second = record(runtime), record(runtime)
    assert first is not None
    assert second is not None
    for _ in range(50):
        next(runtime.requests)
    page = record(runtime, first.number)
    assert page is not None
    assert (8, True) == (len(page.events), page.more)
    assert page.dropped >= 30
    pages = [record(runtime, first.number, True) for _ in range(2)]
    assert [True, False] == [page.more for page in pages if page is not None]
    assert record(runtime, first.number) is None
    while (page := record(runtime, second.number, True)) is not None and page.more:
        pass
    assert runtime.requests is before
    assert [] == layers_of(runtime)._layers
    assert page is not None


async def test_who_does_not_come_back_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that nobody fetches ends by itself."""
    monkeypatch.setattr(recording, "IDLE", 0.0)
    await this_host().spawn_procs(name="procs")
    runtime = current_runtime()
    before = runtime.requests
    assert record(runtime) is not None
    async with asyncio.timeout(5):
        while runtime.parts["recorders"]:
            await asyncio.sleep(0.02)
    assert runtime.requests is before


async def test_other_hosts_are_in_it(tmp_path: Path) -> None:
    """Their clocks are measured; calls through the tree have their flows too, where a handler has made them; metrics have both hosts."""
    before = configure()
    configure(fan_out=1)
    key = make_key(tmp_path)
    try:
        with worker("--key-file", key) as (url, _):
            there = attach_to_workers([url], key=key).spawn_procs({"gpus": 2}, name="there")
            workers: Any = there.spawn("workers", Worker)
            here = this_host().spawn_procs(name="near")
            near: Any = here.spawn("near", Worker)
            await workers
            await near
            await settled(there, here)

            async def during() -> None:
                await near.ask_all.call_one(workers)
                await workers.slice(gpus=0).step.call_one()

            answer, trace = await recorded(tmp_path / "out.json", 1.0, during)
            found, _, _ = await record_all(Job.here(patience=5.0)._survey, 0.1)
            async with serve_metrics(patience=5.0) as served:
                text = await scrape_all(served)
            await shutdown()
    finally:
        configure(fan_out=before.fan_out)
    assert [] == wrong_in(trace)
    assert (6, 0) == (answer.processes, answer.silent)
    assert all(-0.2 < recording.ahead < 0.2 for recording in found)
    assert any(recording.ahead for recording in found)
    names, threads = names_of(trace, "process_name"), names_of(trace, "thread_name")
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    flows = {
        (threads[event["pid"], event["tid"]], names[ends[event["id"]]["pid"]].split(" ")[0])
        for event in trace["traceEvents"]
        if event["ph"] == "s"
    }
    assert {("near[0]", "there[0]"), ("near[0]", "there[1]"), ("program", "there[0]")} <= flows
    assert {("agent", "ready"): 2, ("client", "ready"): 1} == {
        labels: value for labels, value in values(text, "processes").items() if labels[0] != "proc"
    }
    assert values(text, "link_sent_bytes_total")["tcp",] > 0
