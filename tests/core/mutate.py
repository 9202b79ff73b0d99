"""Seeded mutations of bytes, for feeding protocol code what a broken or hostile peer might send.

``for what, mutant in mutants(sample, mutant_count(), seed=1): ...``: the same arguments give the same mutants in every run, so a failure
is reproduced from its description. One mutant is one to three edits: flipped bits, overwritten, deleted, duplicated, inserted or swapped
pieces, a cut-off end, the tail of another sample, or a changed big- or little-endian integer (where the caller names the length fields,
half of those edits hit one of them). A mutant always differs from its sample.

How many: `mutant_count(share)` is `share` of the environment variable ``MONARCH_MUTANTS``, the number over all protocol tests,
100,000 unless set.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

__all__ = ["mutant_count", "mutants"]

_INTERESTING = (0x00, 0x01, 0x7F, 0x80, 0xC0, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF)  # edges, and msgpack's never-used, str8, array32 and map32


def mutant_count(share: float = 1.0) -> int:
    """`share` of the mutants that all protocol tests together are to try; at least 1."""
    return max(1, round(share * int(os.environ.get("MONARCH_MUTANTS", "100000"))))


def mutants(
    sample: bytes, count: int, seed: int, *, others: Sequence[bytes] = (), lengths: Sequence[tuple[int, int]] = ()
) -> Iterator[tuple[str, bytes]]:
    """`count` mutants of `sample` as `(what was done, bytes)`.

    `others` are further samples, whose tails are spliced in; `lengths` are `(offset, width in bytes)` of the sample's length fields.
    """
    rng = random.Random(seed)
    made = 0
    while made < count:
        mutant, done = sample, []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            edit = rng.choice(_EDITS)
            if edit is _splice:
                what, mutant = _splice(rng, mutant, rng.choice(others) if others else sample)
            elif edit is _integer:
                what, mutant = _integer(rng, mutant, rng.choice(lengths) if lengths and rng.random() < 0.5 else None)
            else:
                what, mutant = edit(rng, mutant)
            done.append(what)
        if mutant != sample:
            made += 1
            yield f"mutant {made} of seed {seed}: {', '.join(done)}", mutant


def _span(rng: random.Random, size: int) -> tuple[int, int]:
    """A piece of `size` bytes as `(start, end)`: mostly a few bytes, now and then up to all."""
    start = rng.randrange(size + 1)
    most = size - start if rng.random() < 0.2 else min(size - start, 8)
    return start, start + rng.randint(0, most)


def _flip(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    if not data:
        return "nothing to flip", data
    index, bit = rng.randrange(len(data)), rng.randrange(8)
    return f"bit {bit} of byte {index} flipped", data[:index] + bytes((data[index] ^ 1 << bit,)) + data[index + 1 :]


def _overwrite(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    start, end = _span(rng, len(data))
    piece = bytes((rng.choice(_INTERESTING),)) * (end - start) if rng.random() < 0.5 else rng.randbytes(end - start)
    return f"{start}:{end} overwritten", data[:start] + piece + data[end:]


def _delete(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    start, end = _span(rng, len(data))
    return f"{start}:{end} deleted", data[:start] + data[end:]


def _duplicate(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    start, end = _span(rng, len(data))
    return f"{start}:{end} doubled", data[:end] + data[start:]


def _insert(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    start, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 16, 300))
    return f"{size} random bytes put in at {start}", data[:start] + rng.randbytes(size) + data[start:]


def _swap(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    first, middle, last = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return f"{first}:{middle} and {middle}:{last} swapped", data[:first] + data[middle:last] + data[first:middle] + data[last:]


def _truncate(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    size = rng.randrange(len(data) + 1)
    return f"cut off at {size}", data[:size]


def _splice(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    start, tail = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    return f"from {start} on another sample's end from {tail}", data[:start] + other[tail:]


def _integer(rng: random.Random, data: bytes, field: tuple[int, int] | None) -> tuple[str, bytes]:
    offset, width = field or (rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8)))
    if offset + width > len(data):
        return "no integer to change", data
    order: Literal["big", "little"] = "big" if field or rng.random() < 0.7 else "little"
    old = int.from_bytes(data[offset : offset + width], order)
    most = (1 << 8 * width) - 1
    new = rng.choice(
        (0, 1, old - 1, old + 1, old // 2, old * 2, old + rng.randint(-64, 64), len(data), most, most >> 1, rng.randint(0, most))
    )
    new = min(max(new, 0), most)
    return f"integer at {offset} ({width} bytes) {old} → {new}", data[:offset] + new.to_bytes(width, order) + data[offset + width :]


_EDITS: tuple[Callable[..., tuple[str, bytes]], ...] = (
    _flip,
    _flip,
    _overwrite,
    _delete,
    _duplicate,
    _insert,
    _swap,
    _truncate,
    _splice,
    _integer,
    _integer,
)
