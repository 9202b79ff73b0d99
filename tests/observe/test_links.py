"""The bytes of links."""

from __future__ import annotations

from typing import Any

from monarch_async import configure, this_host
from monarch_async._core.framing import DATA, PRELUDE
from monarch_async._core.session import Outbound
from monarch_async.observe.job import Job
from monarch_async.observe.records import LinkRow
from tests.observe.working import Worker


async def links() -> tuple[LinkRow, LinkRow]:
    """From the program to the process, and back, as each tells it."""
    rows = {(row.process, row.peer): row for row in await Job.here(patience=5.0).links()}
    return rows["client", "procs[0]"], rows["procs[0]", "client"]


async def test_what_one_side_has_sent_the_other_has_received() -> None:
    """But for acknowledgements. What travels in shared memory is no part of it, what finds no room there is."""
    before = configure()
    configure(segment_bytes=4 << 20)
    try:
        procs = this_host().spawn_procs(name="procs")
        worker: Any = procs.spawn("worker", Worker)
        await worker.length.call_one(b"")
    finally:
        configure(segment_bytes=before.segment_bytes)
    sent, first = await links()
    assert 0 < first.received_bytes <= sent.sent_bytes + 100 * PRELUDE.size
    await worker.length.call_one(b"x" * (1 << 20))
    _, lent = await links()
    assert lent.received_bytes - first.received_bytes < 1 << 19
    await worker.length.call_one(b"x" * (8 << 20))
    out, whole = await links()
    assert 8 << 20 < whole.received_bytes - lent.received_bytes < 9 << 20
    assert 8 << 20 < out.sent_bytes - sent.sent_bytes < 9 << 20


def test_acknowledged_bytes_add_up() -> None:
    """Of headers and bulks, whatever is acknowledged together."""
    outbound = Outbound()
    for number in range(1, 11):
        outbound.number(DATA, 0, b"h" * number, b"b" * (10 * number))
    outbound.acknowledge(3)
    assert 66 == outbound.acknowledged_bytes
    outbound.acknowledge(10)
    assert (605, 0) == (outbound.acknowledged_bytes, outbound.pending_bytes)
