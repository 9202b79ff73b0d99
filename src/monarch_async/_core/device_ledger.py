"""Who may look at which piece of device memory: the books of lending on devices, for both sides, without any device.

The owner's `Ledger`: memory comes in *segments*, each exported as a whole and cut into *blocks* of one size. A block is given to a message
(`take`), lent to the processes that the message goes to (`lend`), and free again when the message is gone (`let_go`) and all loans are over
(`returned`, `peer_gone`). A segment without blocks in use is given back after a while: whoever may have it mapped is asked to unmap it
(`drops`), and when all have (`dropped`), or are gone, it is freed (`frees`). Memory must not be freed while another process maps it.

The borrower's `Mappings`: a segment is in use while a loan of it is; who is asked to unmap it does so when no loan is left.

Rules:

* A block is in use until its message is gone *and* every loan of it is over. Nothing else makes it free, and it is free once.
* What comes twice, late, from the wrong peer or for something unknown changes nothing.
* The segments of one device never have more bytes than the `limit` that `take` is given; a segment counts until it is `freed`.
* Numbers of segments and loans are used once.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any, NamedTuple

__all__ = ["ALIGNED", "DeviceBlock", "DeviceSegment", "Ledger", "Mappings", "State", "Wanted", "rounded"]

KiB, MiB = 1 << 10, 1 << 20
ALIGNED = 2 * MiB
"""What a segment's size is a multiple of: what is smaller would be exported together with memory that is nobody's business."""
SMALL = 2 * MiB
SLAB = 8 * MiB
"""Blocks under `SMALL` bytes are cut from segments of so many."""
LEAST = 64 * KiB


def rounded(size: int) -> int:
    """The size of the block for so many bytes: a power of two up to `SMALL`, then one of four steps between two of them."""
    if size <= SMALL:
        return max(LEAST, 1 << max(0, size - 1).bit_length())
    step = max(ALIGNED, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


class State(enum.Enum):
    """Of a segment."""

    NEW = "new"  # counted; its memory is being allocated
    LIVE = "live"
    DROPPING = "dropping"  # no block of it is in use, nor will be; some process may still map it
    FREEING = "freeing"  # nobody maps it
    KEPT = "kept"  # the owner has closed while loans were out: it is left as it is


class DeviceSegment:
    """`size` bytes on a device, cut into blocks of `block_size`."""

    __slots__ = ("block_size", "blocks", "device", "free", "idle_since", "number", "size", "state", "used", "viewers")

    def __init__(self, number: int, device: int, block_size: int) -> None:
        self.number = number
        self.device = device
        self.block_size = block_size
        self.size = SLAB if block_size < SMALL else block_size
        self.state = State.NEW
        self.blocks = [DeviceBlock(self, offset) for offset in range(0, self.size, block_size)]
        self.free = self.blocks[::-1]  # the one used last at the end
        self.used: set[DeviceBlock] = set()  # with `free`, all of `blocks`
        self.viewers: set[str] = set()  # processes that may have it mapped; of all that have a loan of it at least these
        self.idle_since = 0  # the round in which `used` became empty


class DeviceBlock:
    """A piece of a segment. The object is the same each time it is used; `fence` is its user's, for what orders the uses."""

    __slots__ = ("fence", "held", "loans", "offset", "segment")

    def __init__(self, segment: DeviceSegment, offset: int) -> None:
        self.segment = segment
        self.offset = offset
        self.held = False  # a message has it
        self.loans: set[tuple[str, int]] = set()  # peer and number
        self.fence: Any = None

    @property
    def size(self) -> int:
        return self.segment.block_size


class Wanted(NamedTuple):
    """A segment has to be allocated first: then tell `allocated`, or `failed`."""

    number: int
    device: int
    size: int


class Ledger:
    """The owner's half; see the module's text."""

    def __init__(self) -> None:
        self.segments: dict[int, DeviceSegment] = {}  # all that count
        self._loans: dict[str, dict[int, DeviceBlock]] = {}  # by peer and number
        self._segment_numbers = itertools.count(1)
        self._loan_numbers = itertools.count(1)
        self._round = 0

    def bytes_on(self, device: int) -> int:
        """Memory on a device, in use or not."""
        return sum(segment.size for segment in self.segments.values() if segment.device == device)

    def take(self, device: int, size: int, limit: int) -> DeviceBlock | Wanted | str:
        """A block for a message, or what has to be done first, or why there is none."""
        block_size = rounded(size)
        for segment in self.segments.values():
            if segment.device == device and segment.block_size == block_size and segment.state is State.LIVE and segment.free:
                return self._use(segment)
        segment = DeviceSegment(0, device, block_size)
        held = self.bytes_on(device)
        if held + segment.size > limit:
            self._make_room(device, held + segment.size - limit)
            return f"{held} bytes of device {device} are set aside and {segment.size} more would pass the bound of {limit}"
        segment.number = next(self._segment_numbers)
        self.segments[segment.number] = segment
        return Wanted(segment.number, device, segment.size)

    def allocated(self, number: int) -> DeviceBlock:
        """The memory of a segment is there: its first block, for who wanted it."""
        segment = self.segments[number]
        segment.state = State.LIVE
        return self._use(segment)

    def failed(self, number: int) -> None:
        """There is no memory for it."""
        del self.segments[number]

    def let_go(self, block: DeviceBlock) -> None:
        """Its message is gone."""
        block.held = False
        self._settle(block)

    def lend(self, block: DeviceBlock, peer: str) -> int:
        """The number of a new loan of a block that a message has."""
        if not block.held:
            raise ValueError("only what a message has can be lent")
        number = next(self._loan_numbers)
        block.loans.add((peer, number))
        block.segment.viewers.add(peer)
        self._loans.setdefault(peer, {})[number] = block
        return number

    def shown(self, block: DeviceBlock, peer: str) -> None:
        """A peer may map the block's segment from now on, without a loan."""
        block.segment.viewers.add(peer)

    def returned(self, peer: str, number: int) -> None:
        """A loan is over."""
        block = self._loans.get(peer, {}).pop(number, None)
        if block is not None:
            block.loans.discard((peer, number))
            self._settle(block)

    def peer_gone(self, peer: str) -> None:
        """A process has ended, and all that it had with it."""
        for number, block in self._loans.pop(peer, {}).items():
            block.loans.discard((peer, number))
            self._settle(block)
        for segment in self.segments.values():
            segment.viewers.discard(peer)
            self._progress(segment)

    def age(self) -> None:
        """Give up the segments that have not been in use since the call before the last one."""
        self._round += 1
        for segment in self.segments.values():
            if segment.state is State.LIVE and not segment.used and segment.idle_since < self._round - 1:
                self._give_up(segment)

    def drops(self, peer: str) -> list[int]:
        """The segments that a peer has to unmap. To ask it for one more than once does no harm."""
        return [number for number, segment in self.segments.items() if segment.state is State.DROPPING and peer in segment.viewers]

    def dropped(self, peer: str, number: int) -> None:
        """A peer has unmapped a segment that it was asked for."""
        segment = self.segments.get(number)
        if segment is not None and segment.state is State.DROPPING:
            segment.viewers.discard(peer)
            self._progress(segment)

    def frees(self) -> list[DeviceSegment]:
        """The segments whose memory is to be freed; each until `freed`."""
        return [segment for segment in self.segments.values() if segment.state is State.FREEING]

    def freed(self, number: int) -> None:
        """The memory of a segment is gone."""
        segment = self.segments.get(number)
        if segment is not None and segment.state is State.FREEING:
            del self.segments[number]

    def close(self, peers: set[str]) -> None:
        """These processes are heard of no more: what is on loan to one of them is left as it is for ever, what they merely map is over."""
        for segment in self.segments.values():
            if any(peer in peers for block in segment.used for peer, _ in block.loans):
                segment.state = State.KEPT
            segment.viewers -= peers
            self._progress(segment)
        for peer in peers:
            self._loans.pop(peer, None)

    def validate(self) -> None:
        """Raise `AssertionError` where the books are wrong."""
        loans = {(peer, number): block for peer, numbers in self._loans.items() for number, block in numbers.items()}
        for number, segment in self.segments.items():
            assert number == segment.number
            assert segment.size % ALIGNED == 0
            assert len(segment.free) == len(set(segment.free)), "a block is free twice"
            assert set(segment.blocks) == set(segment.free) | segment.used
            assert not set(segment.free) & segment.used
            for block in segment.blocks:
                assert (block in segment.used) == (block.held or bool(block.loans)), (
                    "a block is in use while somebody has it, and no longer"
                )
                for peer, loan in block.loans:
                    assert segment.state is State.KEPT or (peer in segment.viewers and loans.pop((peer, loan)) is block)
            if segment.state in (State.NEW, State.DROPPING, State.FREEING):
                assert not segment.used
            if segment.state is State.FREEING:
                assert not segment.viewers
        assert not loans, "a loan of nothing"

    def _use(self, segment: DeviceSegment) -> DeviceBlock:
        block = segment.free.pop()
        segment.used.add(block)
        block.held = True
        return block

    def _settle(self, block: DeviceBlock) -> None:
        segment = block.segment
        if block.held or block.loans or block not in segment.used:
            return
        segment.used.discard(block)
        segment.free.append(block)
        if not segment.used:
            segment.idle_since = self._round

    def _make_room(self, device: int, size: int) -> None:
        """Give up unused segments, the ones idle longest first; some may be free at once, others when those who map them have answered."""
        idle = [found for found in self.segments.values() if found.device == device and found.state is State.LIVE and not found.used]
        size -= sum(
            found.size for found in self.segments.values() if found.device == device and found.state in (State.DROPPING, State.FREEING)
        )
        for segment in sorted(idle, key=lambda found: found.idle_since):
            if size <= 0:
                break
            self._give_up(segment)
            size -= segment.size

    def _give_up(self, segment: DeviceSegment) -> None:
        segment.state = State.DROPPING
        self._progress(segment)

    def _progress(self, segment: DeviceSegment) -> None:
        if segment.state is State.DROPPING and not segment.viewers:
            segment.state = State.FREEING


class _Mapping:
    """How many loans use it, and whether its owner wants it unmapped."""

    __slots__ = ("dropping", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.dropping = False


Key = tuple[str, int]
"""Uid of the owner, number of the segment."""


class Mappings:
    """The borrower's half: which segments of others may be unmapped."""

    def __init__(self) -> None:
        self._mappings: dict[Key, _Mapping] = {}

    def __len__(self) -> int:
        return len(self._mappings)

    def use(self, key: Key) -> None:
        """A loan of it has come."""
        self._mappings.setdefault(key, _Mapping()).uses += 1

    def look(self, key: Key) -> None:
        """It is mapped without a loan."""
        self._mappings.setdefault(key, _Mapping())

    def done(self, key: Key) -> bool:
        """A loan of it is over. Whether it is to be unmapped now."""
        mapping = self._mappings.get(key)
        if mapping is None or not mapping.uses:
            return False
        mapping.uses -= 1
        return self._unmap(key, mapping)

    def drop(self, key: Key) -> bool:
        """Its owner wants it back. Whether it is to be unmapped now; else `done` will say so."""
        mapping = self._mappings.setdefault(key, _Mapping())
        mapping.dropping = True
        return self._unmap(key, mapping)

    def owner_gone(self, owner: str) -> list[Key]:
        """Nobody waits for its memory any more. What is to be unmapped now."""
        return [key for key in [key for key in self._mappings if key[0] == owner] if self.drop(key)]

    def _unmap(self, key: Key, mapping: _Mapping) -> bool:
        if mapping.uses or not mapping.dropping:
            return False
        del self._mappings[key]
        return True
