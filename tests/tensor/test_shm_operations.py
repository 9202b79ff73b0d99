"""Operations over shared memory, in real processes, against a reference that every member computes for itself.

Sizes are such that a tensor is empty, smaller than what a part is rounded to, ends within a block, and is larger than the whole ring.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tensor.shm_members import OPS, TIMEOUT, TYPES, Case, Members, members

SIZES = (0, 1, 7, 1009, 32771)
LARGE = 1_500_007
"""Elements; nearly six mebibytes of float32, and a ring has four."""


@pytest.fixture(scope="module")
def four() -> Iterator[Members]:
    with members(4) as there:
        yield there


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_with_every_type(four: Members, size: int) -> None:
    """all_reduce, reduce and reduce_scatter with all reductions and types, the rest with all types, whatever the number of elements."""
    cases = [
        Case(kind, dtype, count, op, root=count % size)
        for kind in ("all_reduce", "reduce", "reduce_scatter")
        for dtype in TYPES
        for op in OPS
        for count in (SIZES if op == "sum" else (1009,))
    ]
    cases += [
        Case(kind, dtype, count, root=count % size)
        for kind in ("broadcast", "all_gather", "all_to_all", *(("ring",) if size > 1 else ()))
        for dtype in (*TYPES, "bool")
        for count in SIZES
    ]
    with four.group(size) as name:
        four.check(name, size, [case for case in cases if case.fits()])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tensors_larger_than_the_ring(four: Members, size: int) -> None:
    """All blocks arrive, each in its place, though slots are used again and again."""
    kinds = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "ring")
    cases = [Case(kind, dtype, LARGE, root=size - 1) for kind in kinds for dtype in ("float32", "int64")]
    with four.group(size) as name:
        four.check(name, size, [*cases, Case("reduce_scatter", "float16", LARGE, "mean")])


def test_the_same_bits_everywhere_and_in_every_run(four: Members) -> None:
    """Float sums that depend on their order have the same bits on all members, and again in another group."""
    cases = [Case("all_reduce", dtype, count) for dtype in ("float32", "bfloat16", "float64") for count in (5, 1009, 32771, LARGE)]
    runs = []
    for _ in range(2):
        with four.group(4) as name:
            digests = four.check(name, 4, cases)
        assert [digests[0]] * 4 == digests
        runs.append(digests[0])
    assert runs[0] == runs[1]


def test_two_groups_at_once_in_the_same_processes(four: Members) -> None:
    """Operations of two groups are under way at the same time, and none gets anything of the other's."""
    cases = [Case("all_reduce", "float32", 500_009), Case("all_gather", "int32", 100_003), Case("ring", "float32", 300_007)]
    with four.group(2) as one, four.group(2) as other:
        found = [member.check_both.call_one([one, other], cases) for member in four.each[:2]]
        assert [[], []] == [answer.get(timeout=TIMEOUT) for answer in found]


def test_a_send_does_not_hold_up_a_collective(four: Members) -> None:
    """Of two large operations that members start in different orders none waits for the other: a pair has an order of its own."""
    with four.group(2) as name:
        answers = [member.cross.call_one(name, LARGE) for member in four.each[:2]]
        assert [True, True] == [answer.get(timeout=TIMEOUT) for answer in answers]


def test_many_operations_one_after_the_other(four: Members) -> None:
    """Small ones and large ones in turn, started as fast as they end: each sees its own values."""
    with four.group(3) as name:
        for run in range(20):
            four.check(name, 3, [Case("all_reduce", "float32", count) for count in (1, 40_000, 3, 600_000)], run)
