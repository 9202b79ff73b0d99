"""Memory for large messages: buffers are reused, bounded, and never shared."""

from __future__ import annotations

import random

import pytest

from monarch_async._channel.pool import HUGE, BufferPool, allocate


def test_a_buffer_is_used_again() -> None:
    """A buffer given back serves the next message of its size, and a somewhat smaller one."""
    pool = BufferPool()
    first, view = pool.take(100_000)
    assert len(view) == 100_000
    del view
    pool.give(first)
    assert 100_000 == pool.kept
    for size in (100_000, 60_000, 100_000):
        buffer, view = pool.take(size)
        assert first is buffer
        assert (size, 0) == (len(view), pool.kept)
        del view
        pool.give(buffer)


def test_a_small_message_takes_no_huge_buffer() -> None:
    """A buffer of four times the size or more is left for messages that need it."""
    pool = BufferPool()
    pool.give(bytearray(400_000))
    assert len(pool.take(90_000)[0]) == 90_000


def test_what_is_kept_is_bounded() -> None:
    """Past the limit the sizes that were idle longest go; a buffer larger than the limit is not kept and displaces nothing."""
    pool = BufferPool(limit=1000)
    for size in (300, 300, 100, 600):
        pool.give(bytearray(size))
    assert 1000 == pool.kept
    pool.give(bytearray(5000))
    assert 1000 == pool.kept
    kept = pool.take(100)[0], pool.take(600)[0]
    assert ([100, 600], 300) == ([len(buffer) for buffer in kept], pool.kept)


def test_no_buffer_is_out_twice() -> None:
    """Over a long random history every buffer that is out is out once, large enough, and the account is right."""
    rng = random.Random(5)
    pool = BufferPool(limit=1 << 20)
    out: dict[int, object] = {}
    for _ in range(5000):
        if out and rng.random() < 0.5:
            pool.give(out.pop(rng.choice(list(out))))  # type: ignore[arg-type]
        else:
            size = rng.choice((0, 1, 1000, rng.randrange(200_000)))
            buffer, view = pool.take(size)
            assert id(buffer) not in out
            assert size == len(view)
            out[id(buffer)] = buffer
        assert 0 <= pool.kept <= 1 << 20


@pytest.mark.parametrize("size", [0, 1, 100_000, HUGE - 1, HUGE, HUGE + 1])
def test_allocated_memory_can_be_written(size: int) -> None:
    """Memory of each kind has the size asked for and takes bytes to its end."""
    view = allocate(size)
    view[:] = b"x" * size
    assert (size, b"x" * min(size, 10)) == (view.nbytes, bytes(view[-10:]) if size else b"")


def test_memory_that_is_announced_is_not_committed() -> None:
    """Asking for gigabytes costs no memory until it is filled."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    view = allocate(4 << 30)
    assert resident() - before < 64 << 20
    del view


def test_memory_that_is_not_there() -> None:
    """A size that no machine has is a `MemoryError` that names it."""
    with pytest.raises(MemoryError, match=str(1 << 60)):
        allocate(1 << 60)
