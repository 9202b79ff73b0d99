"""The page ``/metrics`` of a job, as a scraper sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from monarch_async import Restart, UsageError, configure, this_host
from monarch_async.ambient import current_runtime
from monarch_async.observe.metrics.serving import serve_metrics, token_file
from tests.observe.meters import PREFIX, scrape, scrape_all, values
from tests.observe.working import Worker, settled


async def test_one_scrape_has_the_sums_of_all_processes() -> None:
    """Calls by endpoint and outcome, their durations, actors, links, memory; read by Prometheus's own parser, without ranks and pids."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs")
    workers: Any = procs.spawn("workers", Worker)
    await workers
    await settled(procs)
    async with serve_metrics() as served:
        await scrape_all(served)  # from now on they count
        for _ in range(3):
            await workers.step.call(0.002)
        await workers.block.call(0.03)
        with pytest.raises(ValueError, match="on purpose"):
            await workers.slice(gpus=0).fail.call_one()
        with pytest.raises(TimeoutError):
            await workers.slice(gpus=1).step.options(timeout=0.05).call_one(10)
        text = await scrape_all(served)
    calls = values(text, "calls_total")
    assert 6 == calls["Worker", "step", "ok"]
    assert 1 == calls["Worker", "step", "cancelled"]
    assert 2 == calls["Worker", "block", "ok"]
    assert 1 == calls["Worker", "fail", "error"]
    assert 7 == values(text, "call_duration_seconds_count")["Worker", "step"]
    assert 0.06 < values(text, "call_duration_seconds_sum")["Worker", "block"] < 1
    buckets = values(text, "call_duration_seconds_bucket")
    assert (0, 2) == (buckets["Worker", "block", "0.01"], buckets["Worker", "block", "+Inf"])
    assert {("Worker",): 2} == values(text, "actors")
    assert {("Worker",): 0} == values(text, "mailbox_messages")
    assert {(): 0} == values(text, "unreachable_processes")
    assert values(text, "link_sent_bytes_total")["unix",] > 1000
    assert values(text, "link_received_bytes_total")["unix",] > 1000
    assert {("agent", "ready"): 1, ("client", "ready"): 1} == {
        key: value for key, value in values(text, "processes").items() if key[0] != "proc"
    }
    names = {name for family in text_string_to_metric_families(text) for sample in family.samples for name in sample.labels}
    assert not names & {"rank", "pid", "process", "host", "instance"}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(PREFIX)
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")


async def test_a_full_mailbox_and_a_late_loop_are_seen() -> None:
    """Messages that wait, and the handler that runs; how long the loop was held."""
    procs = this_host().spawn_procs(name="procs")
    worker: Any = await procs.spawn("workers", Worker)
    await settled(procs)
    async with serve_metrics() as served:
        await scrape_all(served)
        calls = [worker.step.call_one(30), *(worker.step.call_one() for _ in range(4))]
        async with asyncio.timeout(10):
            while {("Worker",): 4} != values(text := await scrape(served.url, served.token), "mailbox_messages"):
                await asyncio.sleep(0.02)
        assert {("Worker",): 4} == values(text, "mailbox_messages_max")
        assert {("Worker",): 1} == values(text, "calls_running")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await worker.hold.call_one(0.7)
        async with asyncio.timeout(10):
            while True:
                buckets = values(await scrape(served.url, served.token), "loop_lag_seconds_bucket")
                if buckets["+Inf",] > buckets["0.05",]:
                    break
                await asyncio.sleep(0.05)


async def test_who_does_not_answer_is_counted_and_holds_up_nobody() -> None:
    """A halted process is one that is unreachable, in bounded time, and what it had counted stays; so does that of one that was stopped."""
    procs, others = this_host().spawn_procs(name="procs"), this_host().spawn_procs(name="others")
    worker: Any = procs.spawn("worker", Worker)
    other: Any = others.spawn("other", Worker)
    await worker
    await other
    await settled(procs, others)
    async with serve_metrics(patience=0.5) as served:
        await scrape_all(served)
        await worker.step.call_one()
        await other.step.call_one()
        before = await scrape_all(served)
        os.kill((await others.health()).item().pid, signal.SIGSTOP)
        start = time.monotonic()
        halted = await scrape(served.url, served.token)
        assert time.monotonic() - start < 5
        async with asyncio.timeout(10):
            while {(): 1} != values(halted, "unreachable_processes"):
                halted = await scrape(served.url, served.token)
        assert 1 == values(halted, "actors")["Worker",]
        assert 2 == values(before, "calls_total")["Worker", "step", "ok"] == values(halted, "calls_total")["Worker", "step", "ok"]
        os.kill((await others.health()).item().pid, signal.SIGCONT)
        await others.stop()
        after = await scrape_all(served)
        assert 2 == values(after, "calls_total")["Worker", "step", "ok"]
        await worker.step.call_one()
        assert 3 == values(await scrape_all(served), "calls_total")["Worker", "step", "ok"]


async def test_restarts_have_their_reason() -> None:
    """The signal of a process that was killed, an exception of an actor; siblings that go along are told apart."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs", restart=Restart())
    workers: Any = procs.spawn("workers", Worker, restart=Restart(strategy="one_for_all"))
    await workers
    await settled(procs)
    async with serve_metrics() as served:
        await scrape_all(served)
        os.kill((await procs.slice(gpus=0).health()).item().pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while values(text := await scrape(served.url, served.token), "restarts_total").get(("SIGKILL",), 0) < 2:
                await asyncio.sleep(0.05)
            assert 1 == values(text, "restarts_total")["sibling",]
            await workers.step.options(retry=5).call()
            await workers.slice(gpus=1).fail.broadcast()
            while values(text := await scrape(served.url, served.token), "restarts_total").get(("exception",), 0) < 1:
                await asyncio.sleep(0.05)


async def test_the_token_is_wanted(tmp_path: Path) -> None:
    """Without it nothing is shown; it is kept in a file that only the user can read, and is the same the next time."""
    async with serve_metrics() as served, aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {served.token}"}):
            async with session.get(served.url, headers=headers) as response:
                assert (401, "Bearer") == (response.status, response.headers["WWW-Authenticate"])
                assert PREFIX not in await response.text()
        assert 0o600 == stat.S_IMODE(os.stat(token_file()).st_mode)
        assert served.token == Path(token_file()).read_text()
        first = served.token
    async with serve_metrics() as served:
        assert first == served.token
    async with serve_metrics(token="") as served:
        assert "monarch_async_unreachable_processes" in await scrape(served.url, "")
    with pytest.raises(UsageError, match="without a token"):
        async with serve_metrics(host="0.0.0.0", token=""):
            pass
    with pytest.raises(UsageError, match="at least 16"):
        async with serve_metrics(token="short"):
            pass
    os.chmod(token_file(), 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        async with serve_metrics():
            pass


@pytest.fixture
def debug(request: pytest.FixtureRequest) -> Iterator[None]:
    """For runtimes that are started from now on."""
    configure(debug=request.param)
    yield
    configure(debug=False)


@pytest.mark.parametrize("debug", [False, True], indirect=True)
async def test_the_environment_switches_it_on(debug: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start, also in processes of which nobody has asked yet, and where handlers can be stopped."""
    monkeypatch.setenv("MONARCH_ASYNC_METRICS", "0")
    procs = this_host().spawn_procs(name="procs")
    worker: Any = procs.spawn("workers", Worker)
    await worker.step.call_one()
    runtime = current_runtime()
    async with asyncio.timeout(10):
        while "metrics served" not in runtime.parts:
            await asyncio.sleep(0.01)
    served = runtime.parts["metrics served"]
    text = await scrape_all(served)
    assert 1 == values(text, "calls_total")["Worker", "step", "ok"]


async def test_nothing_is_left_around_handlers() -> None:
    """While nobody asks handlers are as their class has them, and again when the page is closed; those that begin meanwhile are watched."""
    runtime = current_runtime()
    procs = this_host().spawn_procs(name="procs")
    far: Any = procs.spawn("far", Worker)
    assert not await far.is_watched.call_one()
    await settled(procs)
    async with serve_metrics() as served:
        await scrape_all(served)
        assert await far.is_watched.call_one()
        later: Any = procs.spawn("later", Worker)
        assert await later.is_watched.call_one()
        assert "meter" in runtime.parts
    assert "meter" not in runtime.parts
    assert not await far.is_watched.call_one()
    assert not await later.is_watched.call_one()
