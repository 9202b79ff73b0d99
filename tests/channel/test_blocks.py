"""Pools of blocks: whatever is taken and let go in whatever order, no two blocks overlap and none changes but by its owner."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from monarch_async._channel import block as single
from monarch_async._channel import blocks
from monarch_async._channel.block import Block
from monarch_async._channel.blocks import SLAB, SLICE, SMALL, SegmentPool
from monarch_async._channel.segment import PAGE, SUPPORTED, Segment

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
LIMIT = 24 << 20
SIZES = st.one_of(
    st.integers(1, 20 * PAGE),
    st.sampled_from([PAGE - 1, PAGE, PAGE + 1, SMALL - 1, SMALL, SMALL + 1, 6 << 20, LIMIT, LIMIT + 1]),
    st.integers(1, 9 << 20),
)


def taken(pool: SegmentPool, size: int, *, shared: bool = False) -> Block:
    block = pool.take(size, shared=shared)
    assert isinstance(block, Block), block
    return block


def filled(pool: SegmentPool, size: int, content: bytes = b"x") -> Block:
    block = taken(pool, size)
    block.fill([(0, content)])
    return block


def memory_of(block: Block) -> int:
    """Bytes of memory that the block's segment has."""
    return os.fstat(block.segment._fd).st_blocks * 512


def aged(pool: SegmentPool) -> None:
    """A round is over, and what was not used is given back."""
    pool.age()
    while pool.release():
        pass


@contextlib.contextmanager
def no_more_memory() -> Iterator[None]:
    """What is written to any file, a segment too, is refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fails_to_fill(pool: SegmentPool, size: int) -> None:
    """Take a block that has no memory yet, and let it go as there is none for it."""
    block = taken(pool, size)
    with no_more_memory(), pytest.raises(OSError, match="File too large"):
        block.fill([(0, b"x")])


@contextlib.contextmanager
def nothing_can_be_given_back() -> Iterator[None]:
    """As a system would do that does not know how to."""

    def refuse(segment: Segment, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "discard", refuse)
        yield


class Held:
    """A block that is in use, and what was last written to it: at its start, and at the end of what was asked for."""

    def __init__(self, block: Block, size: int, shared: bool) -> None:
        self.block = block
        self.size = size
        self.shared = shared
        self.content = b""


class Pools(RuleBasedStateMachine):
    """One pool, in which blocks are taken, filled, let go, aged, forked over, in any order."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(LIMIT)
        self.live: dict[int, Held] = {}
        self.names = 0
        self.retired: list[int] = []

    @rule(target=held, size=SIZES, shared=st.booleans())
    def take(self, size: int, shared: bool) -> Any:
        block = self.pool.take(size, shared=shared)
        if isinstance(block, str):
            in_use = sum(held.block.size for held in self.live.values())
            # What is not in use makes room: it is refused only for what is, or was when a child was forked.
            assert size > SMALL or in_use + blocks._rounded(size) > LIMIT - self.spoilt_bytes() or "descriptors" in block
            return multiple()
        assert block.size >= size
        assert 0 == block.offset % PAGE == block.size % PAGE
        self.names += 1
        self.live[self.names] = Held(block, size, shared)
        return self.names

    def spoilt_bytes(self) -> int:
        return self.pool.allocated - self.pool.kept - sum(held.block.size for held in self.live.values())

    @rule(name=held, content=st.binary(min_size=1, max_size=64))
    def fill(self, name: int, content: bytes) -> None:
        held = self.live.get(name)
        if held is None:
            return
        held.content = content = content[: held.size]
        held.block.fill([(0, content), (held.size - len(content), content)] if held.size >= 2 * len(content) else [(0, content)])

    @rule(name=consumes(held))
    def let_go(self, name: int) -> None:
        self.live.pop(name, None)

    @rule(size=SIZES)
    def fail(self, size: int) -> None:
        """A block for which the system has no memory left, if it is a new one."""
        block = self.pool.take(size)
        if isinstance(block, Block):
            with no_more_memory(), contextlib.suppress(OSError):
                block.fill([(0, b"x")])

    @rule()
    def age(self) -> None:
        self.pool.age()

    @rule()
    def release(self) -> None:
        self.pool.release()

    @rule()
    def fail_to_release(self) -> None:
        with nothing_can_be_given_back():
            self.pool.release()

    @rule()
    def fork(self) -> None:
        single._count_fork()  # what the hook of a fork does in the parent

    @rule()
    def close(self) -> None:
        """Blocks in use outlive their pool, and another pool begins."""
        self.pool.close()
        self.check_content()
        self.pool = SegmentPool(LIMIT)
        self.live.clear()
        self.retired.clear()

    @invariant()
    def none_overlap(self) -> None:
        ranges = sorted((held.block.address, held.block.address + held.block.size) for held in self.live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))

    @invariant()
    def check_content(self) -> None:
        for held in self.live.values():
            view = memoryview((ctypes.c_ubyte * held.size).from_address(held.block.address)).cast("B")
            assert held.content == view[: len(held.content)]
            if held.size >= 2 * len(held.content):
                assert held.content == view[held.size - len(held.content) :]

    @invariant()
    def figures_are_right(self) -> None:
        pool = self.pool
        assert 0 <= pool.kept <= pool.allocated <= LIMIT
        assert sum(held.block.size for held in self.live.values()) <= pool.allocated

    @invariant()
    def only_shared_ones_are_found(self) -> None:
        for held in self.live.values():
            found = self.pool.find(held.block.address + held.size // 2, 1)
            assert (held.block if held.shared else None) is found
            assert self.pool.find(held.block.address, held.block.size + 1) is None

    @invariant()
    def retired_ones_are_gone(self) -> None:
        self.retired += self.pool.take_retired()
        assert not {held.block.segment.number for held in self.live.values()} & set(self.retired)
        assert len(self.retired) == len(set(self.retired))

    def teardown(self) -> None:
        """Whatever has happened, all memory comes back once it is not used."""
        self.live.clear()
        aged(self.pool)
        aged(self.pool)
        assert (0, 0) == (self.pool.allocated, self.pool.kept)
        self.pool.close()


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_block_is_used_again_while_it_is_warm() -> None:
    """The one given back last is taken first; its memory stays where it is."""
    pool = SegmentPool(LIMIT)
    first, second = filled(pool, 5 << 20), filled(pool, 5 << 20)
    place = second.address
    del first
    del second
    assert place == taken(pool, (5 << 20) - 100).address
    assert 10 << 20 == pool.allocated
    pool.close()


def test_what_is_not_used_goes_back_to_the_system() -> None:
    """After two rounds without use, not after one: large ones with their segment, whose number is told, small ones without."""
    pool = SegmentPool(LIMIT)
    small, large = filled(pool, 1 << 20), filled(pool, 5 << 20)
    other = filled(pool, 1 << 20, b"other")
    number, slab = large.segment.number, small.segment
    del small, large
    aged(pool)
    assert (7 << 20, 6 << 20) == (pool.allocated, pool.kept)
    aged(pool)
    assert (1 << 20, 0) == (pool.allocated, pool.kept)
    assert [number] == pool.take_retired()
    assert 1 << 20 == memory_of(other)
    again = taken(pool, 1 << 20)
    assert again.segment is slab
    assert b"other" == bytes(other.view()[:5])
    del again, slab
    pool.close()


def test_use_keeps_it() -> None:
    """What is taken at least once a round is not given back."""
    pool = SegmentPool(LIMIT)
    for _ in range(5):
        filled(pool, 5 << 20)
        aged(pool)
    assert 5 << 20 == pool.allocated
    assert [] == pool.take_retired()
    pool.close()


def test_a_full_slab_without_blocks_in_use_is_retired() -> None:
    """Its segment goes once nothing in it has memory."""
    pool = SegmentPool(2 * SLAB)
    held = [filled(pool, SMALL) for _ in range(SLAB // SMALL + 1)]
    first = held[0].segment.number
    assert first != held[-1].segment.number
    del held
    aged(pool)
    aged(pool)
    assert [first] == pool.take_retired()
    assert 0 == pool.allocated
    pool.close()


def test_small_blocks_that_could_not_be_filled_leave_nothing() -> None:
    """However many of them: their memory is not counted for ever, and their places are used again."""
    pool = SegmentPool(LIMIT)
    for _ in range(20):
        fails_to_fill(pool, SMALL)
        aged(pool)
    assert 0 == pool.allocated
    assert LIMIT // SMALL == len([filled(pool, SMALL) for _ in range(LIMIT // SMALL)])
    aged(pool)
    aged(pool)
    assert 0 == pool.allocated
    assert [] == pool.take_retired()
    pool.close()


def test_small_shared_blocks_that_a_child_may_see_go_with_their_segment() -> None:
    """They are counted as long as it is there, and no longer: the pool is not full after some of them."""
    pool = SegmentPool(LIMIT)
    beside = filled(pool, PAGE, b"beside")
    slab = beside.segment.number
    for _ in range(3):
        held = taken(pool, SMALL, shared=True)
        single._count_fork()
        del held
    assert isinstance(pool.take(LIMIT - SMALL), str)
    assert 3 * SMALL + PAGE == pool.allocated == memory_of(beside)
    del beside
    block = filled(pool, LIMIT - SMALL)
    assert slab in pool.take_retired()
    assert block.size == pool.allocated
    pool.close()


def test_what_is_locked_in_memory_goes_back_too() -> None:
    """As all is after ``mlockall``."""
    pool = SegmentPool(LIMIT)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    small = filled(pool, PAGE)
    keeper = filled(pool, PAGE, b"keeper")
    assert 0 == libc.mlock(small.address, 2 * PAGE), os.strerror(ctypes.get_errno())
    del small
    aged(pool)
    aged(pool)
    assert PAGE == pool.allocated == memory_of(keeper)
    pool.close()


def test_where_the_system_takes_no_memory_back() -> None:
    """Nothing raises, ageing goes on, and the figures are right: large blocks go with their segments, small ones when all of theirs do."""
    pool = SegmentPool(LIMIT)
    with nothing_can_be_given_back():
        keeper = filled(pool, PAGE, b"keeper")
        for _ in range(3):
            for size in (SMALL, 5 << 20, 6 << 20):
                filled(pool, size)
            aged(pool)
            aged(pool)
        assert 3 * SMALL + PAGE == pool.allocated == memory_of(keeper)
        assert 6 == len(pool.take_retired())
        assert isinstance(pool.take(20 << 20), str)
        del keeper
        assert isinstance(pool.take(20 << 20), Block)
    pool.close()


def test_memory_goes_back_in_slices() -> None:
    """Of a large block a few megabytes at a time, from its end on; the pool can be used between them, and counts what it still has."""
    pool = SegmentPool(10 * SLICE)
    small, large = filled(pool, PAGE), filled(pool, 2 * SLICE + SLICE // 2)
    reader = large.segment.open_reader()
    del large
    pool.age()
    pool.age()
    for left in (2 * SLICE, SLICE, 0):
        assert pool.doomed
        assert bool(left) == pool.release()
        assert left + PAGE * (1 if left == 2 * SLICE else 2) == pool.allocated
        assert left == os.fstat(reader).st_blocks * 512
        filled(pool, PAGE)
    os.close(reader)
    del small
    pool.close()


def test_room_is_made_of_what_is_not_used() -> None:
    """Before a block is refused, unused ones of other sizes go; the reason for a refusal has the figures and the option's name."""
    pool = SegmentPool(LIMIT)
    for size in (5 << 20, 6 << 20, 7 << 20):
        filled(pool, size)
    block = taken(pool, 20 << 20)
    assert LIMIT >= pool.allocated
    why = pool.take(5 << 20)
    assert f"{20 << 20} bytes are in use and {5 << 20} more would pass the option segment_bytes={LIMIT}" == why
    del block
    assert isinstance(pool.take(5 << 20), Block)
    pool.close()


@pytest.mark.parametrize("size", [PAGE, 1 << 20, 5 << 20])
@pytest.mark.parametrize("length", [-1, 0])
def test_a_block_may_be_filled_to_its_end(size: int, length: int) -> None:
    """Fresh memory that its content fills up exactly, as powers of two do, is no less of use; all of it has memory then."""
    pool = SegmentPool(LIMIT)
    content = os.urandom(size + length)
    block = filled(pool, size, content)
    assert size == block.size == memory_of(block)
    assert content == block.view()[: size + length]
    address = block.address
    del block
    assert address == filled(pool, size, content[::-1]).address
    pool.close()


def test_a_view_holds_its_block() -> None:
    """The memory is not used again while anything is a view of it, or of a part of it."""
    pool = SegmentPool(LIMIT)
    part = taken(pool, 5 << 20, shared=True).view()[100:200]
    place = pool.find(ctypes.addressof(ctypes.c_char.from_buffer(part)), 100)
    assert place is not None
    address = place.address
    del place
    other = taken(pool, 5 << 20)
    assert address != other.address
    del part
    assert address == taken(pool, 5 << 20).address
    del other
    pool.close()


def test_after_a_fork_shared_blocks_are_not_used_again() -> None:
    """Of those that lived while this process was forked; a child may look at them as long as it likes. Others are."""
    pool = SegmentPool(LIMIT)
    shared, private = taken(pool, 5 << 20, shared=True), filled(pool, 5 << 20)
    seen = shared.view()
    seen[:4] = b"seen"
    place, number = private.address, shared.segment.number
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)
        os._exit(0 if b"seen" == bytes(seen[:4]) else 1)
    del shared, private, seen
    assert place == taken(pool, 5 << 20).address
    held = [filled(pool, 5 << 20, b"new") for _ in range(3)]
    assert number in pool.take_retired()
    os.write(write, b"x")
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(read)
    os.close(write)
    assert 15 << 20 == sum(block.size for block in held)
    del held
    after = taken(pool, 5 << 20, shared=True)
    place = after.address
    del after
    assert place == taken(pool, 5 << 20).address
    pool.close()


def test_in_a_forked_child_the_pool_gives_nothing_and_takes_nothing_away() -> None:
    """Its memory is the parent's: the child could change what the parent sends, or discard it."""
    pool = SegmentPool(LIMIT)
    kept = filled(pool, 5 << 20)
    filled(pool, 1 << 20, b"warm")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            refused = pool.take(1 << 20)
            aged(pool)
            aged(pool)
            pool.close()
            code = 0 if isinstance(refused, str) and "forked" in refused else 2
        finally:
            os._exit(code)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    warm = taken(pool, 1 << 20)
    assert b"warm" == bytes(warm.view()[:4])
    assert b"x" == bytes(kept.view()[:1])
    pool.close()


def test_a_closed_pool_leaves_what_is_in_use_alone() -> None:
    """Also once that is let go here: others may still look at it. What is unused goes."""
    pool = SegmentPool(LIMIT)
    block, small = filled(pool, 5 << 20, b"lent"), filled(pool, 1 << 20, b"lent")
    filled(pool, 6 << 20)
    readers = [block.segment.open_reader(), small.segment.open_reader()]
    offset = small.offset
    pool.close()
    del block, small
    gc.collect()
    assert [b"lent", b"lent"] == [os.pread(readers[0], 4, 0), os.pread(readers[1], 4, offset)]
    for fd in readers:
        os.close(fd)


def test_segments_leave_descriptors_to_others() -> None:
    """A quarter of those that a process may have is theirs; unused ones make room, and what is asked for beyond is refused."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    pool = SegmentPool(1 << 30)
    try:
        held = [taken(pool, SMALL + 1) for _ in range(16)]
        why = pool.take(SMALL + 1)
        assert isinstance(why, str)
        assert "a quarter of the descriptors" in why
        assert isinstance(pool.take(SMALL), str)
        del held
        assert isinstance(pool.take(2 * SMALL + 1), Block)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    pool.close()


def test_without_descriptors_there_is_a_reason() -> None:
    """And no exception, nor anything kept."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = SegmentPool(LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, limits[1]))
    fillers = []
    try:
        try:
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        assert "no segment can be had: Too many open files" == pool.take(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)
    assert 0 == pool.allocated


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takers in many threads never get the same memory, and looking for a shared block meanwhile never finds a wrong one."""
    pool = SegmentPool(1 << 30)
    errors: list[BaseException] = []

    def run(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    def use(number: int) -> None:
        for turn in range(150):
            block = taken(pool, PAGE * (1 + turn % 5), shared=turn % 2 == 0)
            mark = bytes([number, turn])
            block.fill([(0, mark)])
            if turn % 2 == 0:
                assert pool.find(block.address + 8, 8) is block
            view = block.view()
            assert mark == view[:2]
            assert mark == view[:2]

    threads = [threading.Thread(target=run, args=(use, number)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == errors
    pool.close()
