"""How an operation runs: as a generator, which yields what it waits for whenever it has to.

Rules:

* Every operation begins with a meeting: a member writes its signature, announces its number, and goes on when all have announced theirs. So
  a signature is read before the one after the next is written, and two places for them are enough.
* Nothing is written to a tensor of the caller's (so, in no FILL) before the signatures were compared, nor after the generator has ended.
* A generator that raises leaves the group's counters where they are: nothing can follow it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from monarch_async.errors import CollectiveMismatch
from monarch_async.tensor.shm.arithmetic import MOVED
from monarch_async.tensor.shm.pages import ANNOUNCED, LINE, SIGNATURE, Member, fence, move
from monarch_async.tensor.shm.plans import Place, Plan
from monarch_async.tensor.shm.schedule import DEPTH, Phase, steps

__all__ = ["KINDS", "Mismatch", "Need", "Transfer", "Transfers", "dtype_code", "is_met"]

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")
_DTYPES = sorted(MOVED, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_COMPARED = 7  # words of a signature: number, kind, type, count, reduction, root, tag
SMALL_DEPTH = 2


class Mismatch(CollectiveMismatch):
    """Members called different operations, or the same one with shapes that don't fit. Nothing was moved."""


class Need(NamedTuple):
    """Until then an operation waits: a word of all of these members has at least this value."""

    word: int
    value: int
    members: Sequence[Member]


Transfer = Generator[Need | None, None, None]
"""Yields what it waits for, or `None`: it could go on, and lets others."""


def is_met(need: Need) -> bool:
    word, value, members = need
    for member in members:
        if member.words[word] < value:
            break
    else:
        return True
    return False


def dtype_code(dtype: torch.dtype) -> int:
    return _CODES[dtype]


class Transfers:
    """The operations of one group; those of one lane (the collectives; what is sent to one member; what comes from one) one after the
    other."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._own = place.own
        self._layout = place.layout
        self._number = 0  # of the last collective
        self._behind = 0  # blocks of all collectives before
        self._sent = [0] * place.size  # blocks, by member
        self._received = [0] * place.size
        self._sends = [0] * place.size  # operations, by member
        self._receives = [0] * place.size

    def collective(self, plan: Plan) -> Transfer:
        """Run a plan."""
        own, layout, behind = self._own, self._layout, self._behind
        words, others = own.words, own.others
        self._number = number = self._number + 1
        at = layout.signature_at(number)
        entry = (number, *plan.signature, plan.extent, *plan.sizes)
        words[at : at + len(entry)] = memoryview(array("q", entry))
        ahead = plan.phases[0] is Phase.FILL and is_met(Need(Phase.DRAIN * LINE, behind + 1 - DEPTH, others))
        if ahead:
            plan.fill(0, layout.slot_at(behind))
            fence()
            words[Phase.FILL * LINE] = behind + 1
        own.post(ANNOUNCED, number)
        need = Need(ANNOUNCED, number, others)
        if not is_met(need):
            yield need
        fence()
        self._compare(plan, entry, at)
        for step in steps(plan.total, plan.phases, plan.source):
            phase, block, awaited, value = step
            if ahead and phase is Phase.FILL and not block:
                continue
            need = Need(awaited * LINE, behind + value, plan.sources if phase is Phase.DRAIN else others)
            if not is_met(need):
                yield need
            fence()
            slot = layout.slot_at(behind + block)
            if phase is Phase.FILL:
                plan.fill(block, slot)
            elif phase is Phase.REDUCE:
                plan.reduce(block, slot)
            else:
                plan.drain(block, slot)
            if phase is not Phase.DRAIN or block < plan.total - 1:
                own.post(phase * LINE, behind + block + 1)
                if phase is plan.phases[-1]:
                    yield None
        self._behind = behind = behind + plan.total
        own.post(Phase.DRAIN * LINE, behind)  # whatever its phases: it has all this behind it

    def _compare(self, plan: Plan, mine: tuple[int, ...], at: int) -> None:
        place, size = self._place, self._layout.size
        expected = mine[:_COMPARED]
        extents = [plan.extent]
        for index, member in place.peers:
            theirs = tuple(member.words[at : at + _COMPARED])
            if theirs != expected:
                raise Mismatch(self._describe(at))
            if plan.sizes:
                sizes = member.words[at + SIGNATURE : at + SIGNATURE + 2 * size]
                if sizes[place.me] != plan.sizes[size + index] or sizes[size + place.me] != plan.sizes[index]:
                    raise Mismatch(
                        f"members {place.me} and {index} differ in all_to_all {mine[0]}, and nothing was moved: member {index} has "
                        f"{sizes[place.me]} elements for member {place.me}, which takes {plan.sizes[size + index]}, and takes "
                        f"{sizes[size + place.me]} of the {plan.sizes[index]} that it has for it"
                    )
                extents.append(member.words[at + _COMPARED])
        if plan.sizes:
            plan.agree(extents)

    def _describe(self, at: int) -> str:
        folded: dict[str, list[int]] = {}
        for index, member in enumerate(self._own.members):
            folded.setdefault(describe(tuple(member.words[at + 1 : at + _COMPARED])), []).append(index)
        parts = [f"{'member' if len(who) == 1 else 'members'} {', '.join(map(str, who))} called {text}" for text, who in folded.items()]
        return f"operation {self._number} differs between members, and nothing was moved: {'; '.join(parts)}"

    def send(self, tensor: torch.Tensor, to: int) -> Transfer:
        """To one member, which has to receive as much."""
        own, layout, me = self._own, self._layout, self._own.me
        other = own.members[to]
        self._sends[to] += 1
        yield from self._meet(tensor, self._sends[to], layout.to + to * LINE, other, layout.wanted + me * LINE, f"send to member {to}")
        if not self._sent[to]:
            own.mine.commit(layout.small_at(to, 0), SMALL_DEPTH * layout.small)
        source, size, word = tensor.data_ptr(), tensor.nbytes, layout.received + me * LINE
        for begin in range(0, size, layout.small):
            count = self._sent[to]
            need = Need(word, count + 1 - SMALL_DEPTH, (other,))
            if not is_met(need):
                yield need
            fence()
            move(self._place.address + layout.small_at(to, count), source + begin, min(layout.small, size - begin))
            self._sent[to] = count + 1
            own.post(layout.sent + to * LINE, count + 1)
            yield None

    def receive(self, tensor: torch.Tensor, source: int) -> Transfer:
        """From one member."""
        own, layout, me = self._own, self._layout, self._own.me
        other = own.members[source]
        self._receives[source] += 1
        mine, theirs = layout.wanted + source * LINE, layout.to + me * LINE
        yield from self._meet(tensor, self._receives[source], mine, other, theirs, f"recv from member {source}")
        target, size, word = tensor.data_ptr(), tensor.nbytes, layout.sent + me * LINE
        for begin in range(0, size, layout.small):
            count = self._received[source]
            need = Need(word, count + 1, (other,))
            if not is_met(need):
                yield need
            fence()
            move(target + begin, other.address + layout.small_at(me, count), min(layout.small, size - begin))
            self._received[source] = count + 1
            own.post(layout.received + source * LINE, count + 1)
            yield None

    def _meet(self, tensor: torch.Tensor, number: int, mine: int, other: Member, theirs: int, what: str) -> Transfer:
        """Words of a pair: the number, then twice type and count."""
        own, place = self._own, 1 + number % 2 * 2
        view = dtype_code(tensor.dtype), tensor.numel()
        own.words[mine + place], own.words[mine + place + 1] = view
        own.post(mine, number)
        need = Need(theirs, number, (other,))
        if not is_met(need):
            yield need
        fence()
        found = other.words[theirs + place], other.words[theirs + place + 1]
        if found != view:
            raise Mismatch(
                f"{what}, the {number}. of its kind, differs between members, and nothing was moved: this member has {view[1]} elements of "
                f"{tensor.dtype}, the other one {found[1]} elements of {_DTYPES[found[0]]}"
            )


def describe(view: Sequence[int]) -> str:
    """A signature in words: kind, type, count, reduction, root, tag."""
    kind, dtype, count, reduction, root, tag = view
    parts = [KINDS[kind], str(_DTYPES[dtype])]
    if KINDS[kind] != "all_to_all":
        parts.append(f"of {count} elements")
    if reduction >= 0:
        parts.append(f"reduction {reduction}")
    if root >= 0:
        parts.append(f"root {root}")
    if tag:
        parts.append(f"({tag:x})")
    return " ".join(parts)
