"""Apache Arrow's buffers, arrays and tables, where there is pyarrow: they hand out their memory as NumPy's arrays do, and are lent."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from monarch_async._channel.segment import SUPPORTED
from monarch_async.testing.plugin import MonarchProcs
from tests.api.lending_actors import Holder, lending_here, loans_here
from tests.api.waiting import until

arrow = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")

NUMBER = 100_000


def values() -> dict[str, Any]:
    numbers = arrow.array(range(NUMBER))
    texts = arrow.array([str(number) for number in range(NUMBER)])
    table = arrow.table({"number": numbers, "text": texts})
    return {
        "buffer": arrow.py_buffer(b"x" * NUMBER),
        "array": numbers,
        "slice": numbers[1000:90_000],
        "nulls": arrow.array([None, 1.5] * NUMBER),
        "texts": texts,
        "batch": table.to_batches()[0],
        "table": table,
        "chunks": arrow.chunked_array([numbers, numbers[:10]]),
    }


@pytest.mark.parametrize("name", values())
async def test_it_is_lent_and_equal(monarch_procs: MonarchProcs, name: str) -> None:
    """There and back; while the receiver has it, it lies in shared memory, and when that lets go of it the memory comes back."""
    holder = monarch_procs(1).spawn("holder", Holder)
    await holder.echo.call_one(None)
    value = values()[name]
    await holder.keep.call_one(value)
    assert 1 == loans_here()
    await holder.drop.call_one()
    await until(lambda: not loans_here())
    back = await holder.echo.call_one(value)
    assert type(value) is type(back)
    assert value.equals(back)
    assert 1 == lending_here().borrowing.leases
    del back
    gc.collect()
    await until(lambda: not lending_here().borrowing._leased)
