"""Spans of handlers, with OpenTelemetry's own SDK in each process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from monarch_async import configure, endpoint, this_host
from monarch_async.observe.job import Job
from monarch_async.sending import MeshEndpoint
from tests.observe.working import Worker

exporter = InMemorySpanExporter()


def provide() -> None:
    """Keep the spans of this process in memory."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


class Traced(Worker):
    """Tells what was kept in its process."""

    @endpoint
    def ask_from_thread(self, other: Any) -> None:
        other.step.call_one().get()
        other.step.broadcast(0.0)

    @endpoint
    async def kept(self) -> list[str]:
        return [span.name for span in exporter.get_finished_spans() if span.name != "Traced.kept"]

    @endpoint
    async def spans(self) -> list[dict[str, Any]]:
        found = [described(span) for span in exporter.get_finished_spans()]
        exporter.clear()
        return found


def described(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent.span_id if span.parent is not None else None,
        "links": [(link.context.trace_id, link.context.span_id) for link in span.links],
        "kind": span.kind,
        "status": span.status.status_code,
        "attributes": dict(span.attributes or {}),
    }


@pytest.fixture(autouse=True)
def with_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MONARCH_ASYNC_SPANS", raising=False)
    configure(spans=True)
    yield
    configure(spans=False)


@pytest.fixture(scope="module")
def tracer() -> trace.Tracer:
    """Of this process, which exports nothing."""
    return TracerProvider().get_tracer("test")


async def test_handlers_are_below_their_callers_and_broadcasts_link(tracer: trace.Tracer) -> None:
    """Over two hops, from a coroutine and a thread; a failed one has the error; a broadcast begins a trace that links to its caller."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs", bootstrap=provide)
    workers: Any = procs.spawn("workers", Traced)
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    with tracer.start_as_current_span("mine") as mine:
        await first.ask.call_one(second)
        await first.ask_from_thread.call_one(second)
        await first.tell.call_one(second)
        while len(await second.kept.call_one()) < 4:  # broadcasts are awaited by nobody
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="on purpose"):
            await second.fail.call_one()
    await second.step.call_one()
    mine_context = mine.get_span_context()
    ask, threaded, tell = await first.spans.call_one()
    found = [span for span in await second.spans.call_one() if span["name"] != "Traced.kept"]
    below_ask, below_thread = (span for span in found[:4] if span["parent"])
    of_thread, of_tell = sorted(
        (span for span in found[:4] if not span["parent"]), key=lambda span: span["links"] != [(threaded["trace"], threaded["id"])]
    )
    failed, alone = found[4:]
    assert ["Traced.ask", "Traced.ask_from_thread", "Traced.tell"] == [span["name"] for span in (ask, threaded, tell)]
    assert {(mine_context.trace_id, mine_context.span_id, SpanKind.SERVER)} == {
        (span["trace"], span["parent"], span["kind"]) for span in (ask, threaded, tell)
    }
    assert {"rpc.system": "monarch_async", "rpc.service": "Traced", "rpc.method": "ask"} | {
        "monarch_async.actor": "workers[0]",
        "monarch_async.rank": 0,
    } == ask["attributes"]
    assert [(ask["trace"], ask["id"]), (ask["trace"], threaded["id"])] == [
        (span["trace"], span["parent"]) for span in (below_ask, below_thread)
    ]
    for span, caller in ((of_thread, threaded), (of_tell, tell)):
        assert (None, [(caller["trace"], caller["id"])], SpanKind.CONSUMER) == (span["parent"], span["links"], span["kind"])
        assert span["trace"] != caller["trace"]
    assert ("Traced.fail", StatusCode.ERROR, mine_context.span_id) == (failed["name"], failed["status"], failed["parent"])
    assert (None, []) == (alone["parent"], alone["links"])
    assert alone["trace"] != mine_context.trace_id


async def test_who_has_no_provider_hands_the_context_on(tracer: trace.Tracer) -> None:
    """No spans there, and those behind it are below the caller's. An actor of this very process takes part."""
    plain, traced = this_host().spawn_procs(name="plain"), this_host().spawn_procs(name="traced", bootstrap=provide)
    between: Any = plain.spawn("between", Traced)
    last: Any = traced.spawn("last", Traced)
    with tracer.start_as_current_span("mine") as mine:
        await between.ask.call_one(last)
    assert [] == await between.spans.call_one()
    (span,) = await last.spans.call_one()
    assert (mine.get_span_context().trace_id, mine.get_span_context().span_id) == (span["trace"], span["parent"])


async def test_without_the_option_nothing_is_carried(tracer: trace.Tracer) -> None:
    """Endpoints are of the plain class, and handlers as their class has them."""
    configure(spans=False)
    procs = this_host().spawn_procs(name="procs", bootstrap=provide)
    worker: Any = procs.spawn("worker", Traced)
    with tracer.start_as_current_span("mine"):
        await worker.step.call_one()
    assert type(worker.step) is MeshEndpoint
    assert [] == await worker.spans.call_one()


async def test_a_debugger_stops_in_the_handler() -> None:
    """Not in what makes its span, nor in OpenTelemetry."""
    procs = this_host().spawn_procs(name="procs", bootstrap=provide)
    worker: Any = procs.spawn("worker", Traced)
    await worker
    job = Job.here()
    assert ["worker[0]"] == await job.stop_next("worker")
    call = worker.step.call_one()
    async with asyncio.timeout(20):
        while not (stopped := await job.stopped()) or not stopped[0].waits:
            await asyncio.sleep(0.02)
    assert "-> if seconds:" in stopped[0].text
    await job.pdb(stopped[0], "c")
    assert 0.0 == await call
