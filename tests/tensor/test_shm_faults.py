"""What goes wrong in a group over shared memory: members that differ, that don't come, that are aborted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async.errors import ChannelError
from tests.tensor.shm_members import TIMEOUT, Case, Members, members

LARGE = 16 << 20
"""Elements, 64 MiB: what takes a while to reduce."""


@pytest.fixture(scope="module")
def three() -> Iterator[Members]:
    with members(3) as there:
        yield there


DIFFERENCES: dict[str, tuple[list[tuple[Any, ...]], list[str]]] = {
    "operation": ([("all_reduce", 8, "sum"), ("all_gather", 8), ("all_reduce", 8, "sum")], ["all_gather", "all_reduce", "members 0, 2"]),
    "count": ([("all_reduce", 8, "sum"), ("all_reduce", 9, "sum"), ("all_reduce", 8, "sum")], ["of 8 elements", "of 9 elements"]),
    "a large count": ([("all_reduce", LARGE, "sum"), ("all_reduce", 8, "sum"), ("all_reduce", 8, "sum")], [f"of {LARGE} elements"]),
    "reduction": ([("all_reduce", 8, "sum"), ("all_reduce", 8, "max"), ("all_reduce", 8, "sum")], ["reduction 0", "reduction 4"]),
    "root": ([("broadcast", 8, 0), ("broadcast", 8, 1), ("broadcast", 8, 0)], ["root 0", "root 1", "members 0, 2"]),
    "sizes": (
        [("all_to_all", 6, [2, 2, 2], [2, 2, 2]), ("all_to_all", 6, [3, 2, 1], [2, 2, 2]), ("all_to_all", 6, [2, 2, 2], [2, 2, 2])],
        ["all_to_all"],
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_members_that_differ_are_told_before_anything_moves(three: Members, case: str) -> None:
    """Every member gets an error that names what was called, nobody's tensor has changed, and the next group is none the worse."""
    calls, named = DIFFERENCES[case]
    with three.group(3) as name:
        answers = [member.differ.call_one(name, *call) for member, call in zip(three.each, calls, strict=True)]
        for answer in answers:
            text = answer.get(timeout=TIMEOUT)
            assert text.startswith("Mismatch: ")
            assert not text.endswith("MOVED")
            assert [] == [word for word in named if word not in text], text
        for member in three.each:
            assert member.differ.call_one(name, "all_gather", 4).get(timeout=TIMEOUT).startswith("Mismatch: ")
    with three.group(3) as name:
        three.check(name, 3, [Case("all_reduce", "float32", 1000)])


def test_a_pair_that_differs_is_told(three: Members) -> None:
    """Sender and receiver of different sizes both get an error that has both."""
    with three.group(2) as name:
        sends = three.each[0].differ.call_one(name, "send", 8, 1)
        takes = three.each[1].differ.call_one(name, "recv", 9, 0)
        for text in (sends.get(timeout=TIMEOUT), takes.get(timeout=TIMEOUT)):
            assert text.startswith("Mismatch: ")
            assert "8 elements" in text
            assert "9 elements" in text


def test_who_waits_for_a_member_is_freed_by_abort(three: Members) -> None:
    """A member that does not come keeps the others waiting, until they are aborted, and no tensor has changed. Later ones fail at once."""
    with three.group(3) as name:
        for member in three.each[:2]:
            member.start.call_one(name, 1000).get(timeout=TIMEOUT)
        for member in three.each[:2]:
            member.abort.call_one(name).get(timeout=TIMEOUT)
            assert ("Aborted: the group was ended", True) == member.outcome.call_one().get(timeout=TIMEOUT)
            assert member.differ.call_one(name, "all_reduce", 4, "sum").get(timeout=TIMEOUT) == "Aborted: the group was ended"


def test_abort_amid_the_blocks(three: Members) -> None:
    """Aborted while blocks move, an operation ends, with an error or because it was done; and the next group is none the worse."""
    with three.group(3) as name:
        for member in three.each:
            member.start.call_one(name, LARGE).get(timeout=TIMEOUT)
        for member in three.each:
            member.abort.call_one(name).get(timeout=TIMEOUT)
        outcomes = [member.outcome.call_one().get(timeout=TIMEOUT)[0] for member in three.each]
        assert {"Aborted: the group was ended"} >= set(outcomes) - {""}
        assert outcomes[0]
    with three.group(3) as name:
        three.check(name, 3, [Case("all_reduce", "float32", 1000)])


def test_a_member_that_does_not_come_to_the_meeting(three: Members) -> None:
    """Those who came are told after their time. A late one finds what they gave, and what it gives them is not kept."""
    path = str(three.path / "late")
    before = [member.open.call_one().get(timeout=TIMEOUT) for member in three.each]
    for member in three.each[:2]:
        with pytest.raises(ChannelError, match=r"has given no descriptors under the name"):
            member.connect.call_one("late", three.addresses, path, 0.5).get(timeout=TIMEOUT)
    three.each[2].connect.call_one("late", three.addresses, path).get(timeout=TIMEOUT)
    three.each[2].close.call_one("late").get(timeout=TIMEOUT)
    assert before == [member.open.call_one().get(timeout=TIMEOUT) for member in three.each]


def test_abort_ends_the_meeting(three: Members) -> None:
    """Who is aborted while it waits for others does so no longer, and leaves nothing."""
    member = three.each[0]
    before = member.open.call_one().get(timeout=TIMEOUT)
    text = member.connect_and_abort.call_one(three.addresses, str(three.path / "aborted")).get(timeout=TIMEOUT / 2)
    assert text.startswith(("Aborted: ", "ChannelError: "))
    assert before == member.open.call_one().get(timeout=TIMEOUT)


def test_nothing_is_left_of_groups_that_are_closed(three: Members) -> None:
    """No descriptor, thread or mapping more after ten groups than after one."""
    counts = []
    for _ in range(2):
        for _ in range(5):
            with three.group(3) as name:
                three.check(name, 3, [Case("all_reduce", "float32", 100_000), Case("ring", "float32", 1000)])
        counts.append([member.open.call_one().get(timeout=TIMEOUT) for member in three.each])
    assert counts[0] == counts[1]
    assert [(0, 0)] * 3 == [count[1:] for count in counts[1]]
