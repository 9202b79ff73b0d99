"""The order of steps, without memory: at any speeds of the members nothing is used before it is there, nor overwritten before it is
used."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from monarch_async.tensor.shm.schedule import DEPTH, Phase, Step, count_blocks, cuts, steps

FILL, REDUCE, DRAIN = Phase
WAYS: dict[str, tuple[tuple[Phase, ...], tuple[Phase, ...], Phase]] = {
    "all_reduce": ((FILL, REDUCE, DRAIN), (FILL, REDUCE, DRAIN), REDUCE),
    "all_gather": ((FILL, DRAIN), (FILL, DRAIN), FILL),
    "broadcast": ((FILL,), (DRAIN,), FILL),
}
"""By operation: the phases of the first member, those of all others, and what is awaited to drain."""


class Model:
    """A member: counters that others see, and the block that is in each slot."""

    def __init__(self, first: bool) -> None:
        self.first = first
        self.counters = dict.fromkeys(Phase, 0)
        self.slots: dict[int, dict[Phase, int]] = {slot: {} for slot in range(DEPTH)}
        self.behind = 0
        self.todo: list[Step] = []
        self.operations: list[tuple[str, int]] = []

    def load(self) -> None:
        """The next operation's steps, when those of the last one are done."""
        while not self.todo and self.operations:
            name, total = self.operations[0]
            first, others, source = WAYS[name]
            self.todo = list(steps(total, first if self.first else others, source))

    @property
    def ahead(self) -> bool:
        return self.todo[0].phase is FILL and not self.todo[0].block

    def end(self) -> None:
        if not self.todo and self.operations:
            self.behind += self.operations.pop(0)[1]
            self.counters[DRAIN] = self.behind


def may(member: Model, members: list[Model]) -> bool:
    """Whether the next step may be taken, by what others show."""
    step = member.todo[0]
    name = member.operations[0][0]
    awaited = members[:1] if name == "broadcast" and step.phase is DRAIN else members
    return all(other.counters[step.awaited] >= member.behind + step.behind for other in awaited if other is not member)


def take(member: Model, members: list[Model]) -> None:
    """Take the next step, and look that what it uses is what it should be."""
    step = member.todo.pop(0)
    block = member.behind + step.block
    slot = block % DEPTH
    if step.phase is FILL:
        readers = [other for other in members if other is not member]
        assert all(other.counters[DRAIN] > block - DEPTH for other in readers), "a slot is overwritten that somebody still reads"
        member.slots[slot] = {FILL: block}
    elif step.phase is REDUCE:
        assert [block] * len(members) == [other.slots[slot].get(FILL) for other in members]
        member.slots[slot][REDUCE] = block
    else:
        name = member.operations[0][0]
        source = WAYS[name][2]
        read = members[:1] if name == "broadcast" else members
        assert [block] * len(read) == [other.slots[slot].get(source) for other in read]
    member.counters[step.phase] = block + 1
    member.end()


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(0, 1 << 30),
)
def test_any_interleaving_of_any_operations_ends_and_is_right(size: int, operations: list[tuple[str, int]], seed: int) -> None:
    """Members at any speeds: each step finds the blocks it is about in the slots, and no member ever waits for good.

    A member goes on with an operation when all have said that they are in it, but may fill a first block before, as in
    `Transfers.collective`.
    """
    chance = random.Random(seed)
    members = [Model(index == 0) for index in range(size)]
    for member in members:
        member.operations = list(operations)
        member.load()
    while any(member.operations for member in members):
        slowest = max(len(member.operations) for member in members)
        there = [member for member in members if member.operations and (len(member.operations) == slowest or member.ahead)]
        able = [member for member in there if may(member, members)]
        assert able, "all wait for each other"
        member = chance.choice(able)
        take(member, members)
        member.load()


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_parts_cover_a_block_once_and_are_aligned(size: int, parts: int, itemsize: int) -> None:
    """Parts follow each other from 0 to the end, begin at cache lines unless they are empty, and none is larger than the first."""
    bounds = cuts(size, parts, itemsize)
    assert (0, size, parts + 1) == (bounds[0], bounds[-1], len(bounds))
    lengths = [high - low for low, high in itertools.pairwise(bounds)]
    assert all(0 <= length <= lengths[0] for length in lengths)
    assert all(low * itemsize % 64 == 0 or low == size for low in bounds)


@given(st.integers(0, 10_000), st.integers(1, 500))
def test_blocks_cover_all_bytes(size: int, block: int) -> None:
    """As many blocks as are needed, and at least one."""
    total = count_blocks(size, block)
    assert total >= 1
    assert total * block >= size > (total - 1) * block or (size, total) == (0, 1)
