"""Numbers of 8 bits: how far off they are, and what they do not hide."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async.tensor.eightbit import SCALE_BYTES, dequantise, error_bound, parts_of, quantise

finite = st.floats(-(2.0**100), 2.0**100, width=32)
small = st.floats(-(2.0**-120), 2.0**-120, width=32, allow_subnormal=True)


@settings(deadline=None, max_examples=50)
@given(st.lists(finite | small | st.floats(-1, 1, width=32), min_size=1, max_size=40), st.integers(1, 7))
def test_error_is_within_the_bound(numbers: list[float], chunk: int) -> None:
    """Every element of every chunk, of numbers as different as float32 has them, against the bound in float64."""
    numbers = numbers + [0.0] * (-len(numbers) % chunk)
    values = torch.tensor(numbers).view(-1, chunk)
    data = quantise(values)
    assert (torch.uint8, len(numbers) + SCALE_BYTES * len(values)) == (data.dtype, data.numel())
    back = dequantise(data, len(values), chunk)
    error = (back.double() - values.double()).abs()
    assert bool((error <= error_bound(values.double())).all()), (values, back)
    assert bool((back[values == 0] == 0).all())


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3000), st.integers(1, 9), st.integers(1, 300))
def test_parts_hold_everything_and_waste_little(count: int, members: int, chunk: int) -> None:
    """Equal parts for all members, no chunk larger than was asked for, and at most an element for each chunk to fill up."""
    parts = parts_of(count, members, chunk)
    assert members == parts.members
    assert 1 <= parts.chunk <= chunk
    assert count <= parts.elements <= max(count, 1) + members * (parts.chunks + 1)
    assert math.prod(parts) == parts.elements


def test_an_overflow_stays_visible() -> None:
    """A chunk with inf or NaN becomes NaN; the others keep their values."""
    for bad in (math.inf, -math.inf, math.nan):
        back = dequantise(quantise(torch.tensor([[1.0, bad], [448.0, -2.0]])), 2, 2)
        assert bool(back[0].isnan().all())
        assert [448.0, -2.0] == back[1].tolist()


def test_whole_batches_at_once() -> None:
    """With more dimensions in front each row is what it would be alone."""
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    data = quantise(values)
    assert (2, 3 * (4 + SCALE_BYTES)) == tuple(data.shape)
    for row, alone in zip(dequantise(data, 3, 4), values, strict=True):
        assert torch.equal(dequantise(quantise(alone), 3, 4), row)
