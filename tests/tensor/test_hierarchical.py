"""Shared memory inside hosts and gloo between them, in processes that are said to be on several hosts, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_async.ids import ProcAddress
from monarch_async.tensor.hosts import members_by_host
from tests.tensor.shm_members import OPS, TIMEOUT, Case, Members, members

SIZES = (1, 1009, 32771)
LARGE = 2_500_003
"""Elements; ten mebibytes of float32, which is more than two pieces."""
TYPES = ("float32", "bfloat16", "int64", "uint8")


@pytest.fixture(scope="module")
def four() -> Iterator[Members]:
    with members(4) as there:
        yield there


OTHERS = [pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("aabb", "abba", "abbb", "abcd", "aab")]


@pytest.mark.parametrize("hosts", ["abab", "aaab", "aabc", "aaaa", "ab", *OTHERS])
def test_every_operation_wherever_the_members_are(four: Members, hosts: str) -> None:
    """Even and uneven hosts, members in any order, one host, and one for each member; below and above the size of a piece."""
    size = len(hosts)
    cases = [
        Case(kind, dtype, count, op, root=root)
        for kind in ("all_reduce", "reduce", "reduce_scatter")
        for dtype in TYPES
        for op in (OPS if dtype in ("float32", "int64") else ("sum",))
        for root in (range(size) if kind == "reduce" and op == "sum" else [0])
        for count in (SIZES if dtype == "float32" and op == "sum" else (1009,))
    ]
    cases += [Case("broadcast", dtype, count, root=root) for dtype in ("float32", "bool") for count in SIZES for root in range(size)]
    cases += [Case(kind, dtype, 1009) for kind in ("all_gather", "all_to_all", "ring") for dtype in (*TYPES, "bool")]
    if hosts in ("aabb", "abab", "aaab"):
        kinds = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
        cases += [Case(kind, "float32", LARGE, root=size - 1) for kind in kinds]
    with four.hosts(hosts) as name:
        four.check(name, size, [case for case in cases if case.fits()])


@pytest.mark.parametrize("hosts", ["abaa", pytest.param("aabb", marks=pytest.mark.slow)])
def test_the_same_bits_everywhere_and_in_every_run(four: Members, hosts: str) -> None:
    """Float sums that depend on their order have the same bits on all members, and again in another group on the same hosts."""
    cases = [Case("all_reduce", dtype, count) for dtype in ("float32", "bfloat16", "float64") for count in (5, 1009, 32771, LARGE)]
    runs = []
    for _ in range(2):
        with four.hosts(hosts) as name:
            digests = four.check(name, 4, cases)
        assert [digests[0]] * 4 == digests
        runs.append(digests[0])
    assert runs[0] == runs[1]


def test_who_waits_for_another_host_is_freed_by_abort(four: Members) -> None:
    """One host is amid a sum whose other host never comes: aborted, it ends there, with an error."""
    with four.hosts("aabb") as name:
        for member in four.each[:2]:
            member.start.call_one(name, LARGE).get(timeout=TIMEOUT)
        for member in four.each[:2]:
            member.abort.call_one(name).get(timeout=TIMEOUT)
            assert member.outcome.call_one().get(timeout=TIMEOUT)[0]
            assert member.differ.call_one(name, "all_reduce", 4, "sum").get(timeout=TIMEOUT).startswith("Aborted: the group was ended")


def test_nothing_is_left_of_groups_that_are_closed(four: Members) -> None:
    """No descriptor, thread or mapping more after ten groups than after one."""
    counts = []
    for _ in range(2):
        for _ in range(5):
            with four.hosts("aabb") as name:
                four.check(name, 4, [Case("all_reduce", "float32", 100_000), Case("all_gather", "float32", 1000)])
        counts.append([member.open.call_one().get(timeout=TIMEOUT) for member in four.each])
    assert counts[0] == counts[1]
    assert [(0, 0)] * 4 == [count[1:] for count in counts[1]]


def test_members_by_host() -> None:
    """In the order of the members, hosts in that of their first ones."""
    addresses = [ProcAddress(str(index), host, "") for index, host in enumerate("bacab")]
    assert ((0, 4), (1, 3), (2,)) == members_by_host(addresses)
    assert () == members_by_host([])
