"""What a rank says of an operation before anything moves, and whether what all ranks say fits together. Pure.

Rules:

* The *kind* of the operation must be the same on all ranks, always; so must its number, since only views of one number are compared.
* The *common* part (reduction, root, dtype, device, the shape as far as it has to agree) must be the same, unless shapes are not checked.
* The *own* part may differ between ranks, and is what uneven operations learn each other's sizes from.
* A coalesced operation has *parts*, for each of which the same holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

__all__ = ["Compared", "Signature", "Wire", "compared", "describe_mismatch", "digest", "fits", "signature_from", "to_wire"]


class Signature(NamedTuple):
    """One rank's view of one operation. Plain values only."""

    kind: str
    common: tuple[Any, ...] = ()
    own: tuple[Any, ...] = ()
    parts: tuple[Signature, ...] = ()

    @property
    def shapes(self) -> str:
        inner = " + ".join(map(str, self.parts)) if self.parts else ""
        own = [str(item) for item in self.own if not isinstance(item, bytes)]  # not the values of small tensors
        return " ".join([*map(str, self.common), *own, inner]).strip()

    def __str__(self) -> str:
        return f"{self.kind} {self.shapes}".rstrip()


Wire = tuple[str, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def to_wire(view: Signature) -> Wire:
    """As plain tuples, which cost less to send than named ones."""
    return view.kind, view.common, view.own, tuple(map(to_wire, view.parts))


def signature_from(wire: Wire) -> Signature:
    """The other way round."""
    kind, common, own, parts = wire
    return Signature(kind, common, own, tuple(map(signature_from, parts)))


def fits(mine: Signature, other: Wire, *, shapes: bool) -> bool:
    """Whether two ranks can go on together; only their kinds count where `shapes` are not to be looked at."""
    kind, common, _, parts = other
    if mine.kind != kind or len(mine.parts) != len(parts):
        return False
    if shapes and mine.common != common:
        return False
    return all(fits(mine_part, part, shapes=shapes) for mine_part, part in zip(mine.parts, parts, strict=True))


Compared = tuple[str, tuple[Any, ...], tuple[Any, ...]]


def compared(view: Signature, *, shapes: bool) -> Compared:
    """What of a view has to be the same on all ranks."""
    return view.kind, view.common if shapes else (), tuple(compared(part, shapes=shapes) for part in view.parts)


def digest(view: Signature, *, shapes: bool) -> int:
    """A number, of 63 bits, that is the same for views that fit together, as far as anybody can expect."""
    told = repr(compared(view, shapes=shapes)).encode()
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "little") >> 1


def describe_mismatch(group: str, number: int, views: Mapping[int, Signature], done: Mapping[int, str]) -> str:
    """What to tell everybody: who called what, by rank, equal views folded, the fewest first; and what those have last finished."""
    folded: dict[str, list[int]] = {}
    for rank, view in sorted(views.items()):
        folded.setdefault(str(view), []).append(rank)
    parts = []
    for text, ranks in sorted(folded.items(), key=lambda item: len(item[1])):
        last = f" (last finished: {done[ranks[0]] or 'nothing'})" if len(ranks) == 1 and ranks[0] in done else ""
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} called {text}{last}")
    return f"operation {number} of {group} differs between ranks, and nothing was moved: {'; '.join(parts)}"
