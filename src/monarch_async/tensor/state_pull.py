"""What a pull has to read, from whom, and where it goes.

All that can be wrong is found before a byte is written. From publishers on this host it gets *views* of the version, and copies from these
in a thread, which takes half the time of ``process_vm_readv``. From others there is one batch of one-sided copies, which go by
publisher. What lies together on both sides is read to where it belongs. What does not (columns of a matrix, a target with
gaps, or on a device) is read to a scratch tensor first, the shortest stretch that has all of it, and put in place when the version has
proved to be whole.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from monarch_async.errors import RDMAError
from monarch_async.rdma import RDMAAction, RDMABuffer
from monarch_async.tensor.layout import Box, Item, Layout, count_runs, cover, runs, span, whole
from monarch_async.tensor.state_errors import StateMismatch
from monarch_async.tensor.state_parts import Part, block_view, memory_key
from monarch_async.tensor.state_shelf import WORD

__all__ = [
    "Pulled",
    "Read",
    "Torn",
    "check",
    "check_word",
    "in_thread",
    "is_whole",
    "new_parts",
    "put_all",
    "read_block",
    "read_parts",
    "sources_of",
    "tensors_in",
]

R = TypeVar("R")

FEW_RUNS = 16
"""So many stretches of memory, or fewer, are read one by one; of more only long ones are."""
LONG_RUN = 64 << 10
"""Bytes."""


class Pulled(dict[str, Tensor]):
    """New tensors by key, and the `version` that they are. A module can load it."""

    def __init__(self, tensors: Mapping[str, Tensor], version: int) -> None:
        super().__init__(tensors)
        self.version = version


class Torn(RDMAError):
    """The version was gone before all of it was read."""


async def in_thread(work: Callable[[threading.Event], R]) -> R:
    """Call it in a thread. Cancelled, this sets the event, and ends when the call has: what that uses is the caller's again."""
    given_up = threading.Event()
    call = asyncio.ensure_future(asyncio.to_thread(work, given_up))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        given_up.set()
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                continue
        raise


Sources = dict[str, list[tuple[int, Item]]]
"""Of each key which publishers have a slice, and which."""


def sources_of(layouts: Sequence[Layout], wanted: Callable[[str], bool]) -> Sources:
    """The published slices of the keys that are wanted."""
    found: Sources = {}
    for index, layout in enumerate(layouts):
        for key, item in layout.items.items():
            if wanted(key):
                found.setdefault(key, []).append((index, item))
    return found


def is_whole(sources: Sources) -> bool:
    """Whether one publisher has all of every tensor."""
    return all(len(found) == 1 and found[0][1].box == whole(found[0][1].shape) for found in sources.values())


def new_parts(sources: Sources) -> dict[str, Part]:
    """New tensors for all of what is published; those that share memory there share it here."""
    made: dict[tuple[Any, ...], Tensor] = {}
    parts = {}
    for key, found in sources.items():
        item = found[0][1]
        tensor = made.get(_identity(found)) if item.box.elements else None
        if tensor is None:
            tensor = made[_identity(found)] = torch.empty(item.shape, dtype=getattr(torch, item.dtype))
        parts[key] = Part(tensor, item.shape, whole(item.shape))
    return parts


def _identity(found: Sequence[tuple[int, Item]]) -> tuple[Any, ...]:
    """Equal for keys that are the same memory at their publishers."""
    return tuple(found)


class Read(NamedTuple):
    """A part of a target that comes from one publisher."""

    source: int
    item: Item
    part: Part
    box: Box


def check(name: str, sources: Sources, parts: Mapping[str, Part]) -> list[Read]:
    """What to read; raises `StateMismatch` with all that does not fit."""
    problems = [f"{key!r} is not published" for key in parts if key not in sources]
    problems += [f"{key!r} is published, and not in the target" for key in sources if key not in parts]
    reads: list[Read] = []
    written: dict[tuple[Any, ...], tuple[str, tuple[Any, ...]]] = {}
    for key, part in parts.items():
        found = sources.get(key)
        if found is None:
            continue
        dtype, shape = str(part.tensor.dtype).removeprefix("torch."), part.shape
        wrong = next((item for _, item in found if (item.dtype, item.shape) != (dtype, shape)), None)
        if wrong is not None:
            problems.append(f"{key!r} is {wrong.dtype} {list(wrong.shape)} as published, {dtype} {list(shape)} in the target")
            continue
        if not part.box.elements:
            continue
        before = written.setdefault(memory_key(part.tensor), (key, _identity(found)))
        if before[0] != key:
            if before[1] != _identity(found):
                problems.append(f"{key!r} and {before[0]!r} share memory in the target, and don't as published")
            continue
        taken, missing = cover(part.box, [item.box for _, item in found])
        if missing:
            problems.append(f"{key!r}: nobody publishes {', '.join(map(str, missing))}")
        reads += [Read(*found[index], part, box) for index, box in taken]
    if problems:
        raise StateMismatch(f"the state dict {name!r} can't be pulled into this, and nothing was written:", problems)
    return reads


Put = Callable[[], None]
"""Puts one thing in its place, in a thread."""


async def read_parts(reads: Sequence[Read], buffers: Sequence[RDMABuffer], views: Mapping[int, Tensor]) -> list[Put]:
    """Read from the publishers of which there is no view. What is returned is to be done when their versions have proved to be whole."""
    action = RDMAAction()  # groups by owner what it is given
    puts: list[Put] = []
    for read in reads:
        buffer, item, tensor = buffers[read.source], read.item, read.part.tensor
        size = tensor.element_size()
        if read.source in views:
            puts.append(partial(_put, tensor, read, narrowed(block_view(views[read.source], item), item.box, read.box)))
        elif _direct(read):
            flat = tensor.view(-1)
            for there, here, elements in runs(item.box, read.part.box, read.box):
                action.read_into(buffer, flat[here : here + elements], offset=item.offset + there * size, size=elements * size)
        else:
            first, elements, strides = span(item.box, read.box)
            scratch = torch.empty(elements, dtype=tensor.dtype)
            action.read_into(buffer, scratch, offset=item.offset + first * size, size=elements * size)
            puts.append(partial(_put, tensor, read, scratch.as_strided(read.box.shape, strides)))
    await action.submit()
    return puts


async def put_all(puts: Sequence[Put]) -> None:
    """Do them, in a thread. Cancelled, some are not done."""

    def work(given_up: threading.Event) -> None:
        with torch.no_grad():
            for put in puts:
                if given_up.is_set():
                    return
                put()

    if puts:
        await in_thread(work)


def _direct(read: Read) -> bool:
    tensor = read.part.tensor
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    count = count_runs(read.item.box, read.part.box, read.box)
    return count <= FEW_RUNS or read.box.elements * tensor.element_size() >= count * LONG_RUN


def narrowed(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """The part of a tensor that is a box."""
    for axis, (first, begin, size) in enumerate(zip(part.offsets, box.offsets, part.shape, strict=True)):
        tensor = tensor.narrow(axis, first - begin, size)
    return tensor


def _put(tensor: Tensor, read: Read, new: Tensor) -> None:
    narrowed(tensor, read.part.box, read.box).copy_(new)


async def read_block(sources: Sources, layout: Layout, buffer: RDMABuffer) -> Tensor:
    """A new block with the bytes of these keys where they are in the published one."""
    block = torch.empty(layout.size, dtype=torch.uint8)
    action = RDMAAction()
    for first, end in _stretches(sources):
        action.read_into(buffer, block[first:end], offset=first, size=end - first)
    await action.submit()
    return block


def _stretches(sources: Sources) -> Iterator[tuple[int, int]]:
    """The bytes of items in one block, joined where little is between them."""
    items = sorted((found[0][1] for found in sources.values()), key=lambda item: item.offset)
    first = end = 0
    for item in items:
        stop = item.offset + item.box.elements * getattr(torch, item.dtype).itemsize
        if item.offset > end + LONG_RUN:
            if end > first:
                yield first, end
            first = item.offset
        end = max(end, stop)
    if end > first:
        yield first, end


def tensors_in(block: Tensor, sources: Sources) -> dict[str, Tensor]:
    """The tensors of a block that one publisher has all of."""
    return {key: block_view(block, found[0][1]) for key, found in sources.items()}


async def check_word(layout: Layout, buffer: RDMABuffer, version: int) -> None:
    """Raise `Torn` if the version is not there any more, so that what was read before this may be another."""
    word = bytearray(WORD.size)
    await buffer.read_into(word, offset=layout.size, size=WORD.size)
    if WORD.unpack(word) != (version,):
        raise Torn(f"version {version} was given up while it was read")
