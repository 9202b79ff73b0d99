"""Members that tell each other in rounds what they have called, in any order of the messages."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from monarch_async.tensor.rounds import Rounds, Said
from monarch_async.tensor.signature import Wire


def wire(index: int) -> Wire:
    """Some are equal."""
    return "all_reduce", (), (index % 3,), ()


def deliver(members: list[Rounds], ready: list[int], chance: random.Random) -> int:
    """Let these call, in this order, while messages of a pair come in order and others in any; how many were sent."""
    links: dict[tuple[int, int], deque[Said]] = {}
    sent = 0

    def send(source: int, all_said: list[Said]) -> None:
        nonlocal sent
        for said in all_said:
            links.setdefault((source, said.to), deque()).append(said)
            sent += 1

    waiting = deque(ready)
    while waiting or any(links.values()):
        pairs = [pair for pair, said in links.items() if said]
        if waiting and (not pairs or chance.random() < 0.3):
            index = waiting.popleft()
            send(index, list(members[index].begin(wire(index))))
        else:
            source, to = chance.choice(pairs)
            said = links[source, to].popleft()
            assert to not in members[to].take(said.round, said.told)
            send(to, list(members[to].go_on()))
    return sent


@given(st.integers(2, 40), st.randoms(use_true_random=False))
def test_everybody_knows_everybody(size: int, chance: random.Random) -> None:
    """Whatever the order: all views, complete everywhere, and log2 n messages of each member."""
    members = [Rounds(size, index) for index in range(size)]
    order = list(range(size))
    chance.shuffle(order)
    assert size * (size - 1).bit_length() == deliver(members, order, chance)
    for me, member in enumerate(members):
        assert member.complete
        assert {index: wire(index) for index in range(size) if index != me} == member.heard


@given(st.integers(2, 40), st.randoms(use_true_random=False))
def test_nobody_goes_on_without_one_that_has_not_come(size: int, chance: random.Random) -> None:
    """One does not call: nobody has heard of it, and nobody is complete."""
    members = [Rounds(size, index) for index in range(size)]
    order = list(range(size))
    chance.shuffle(order)
    late = order.pop()
    deliver(members, order, chance)
    assert not any(member.complete for member in members)
    assert not any(late in member.heard for member in members)
