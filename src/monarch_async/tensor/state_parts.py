"""What a module or a dictionary has in it, as slices of tensors; and how these are put into one block of memory.

Rules:

* A *part* is a tensor's share of this process: all of a plain tensor, what a `DTensor` has here, or what a `TensorSlice` says it is.
* Parts that are the same memory, or of which one lies in another and neither has gaps, are put into the block once (tied weights).
  Parts that overlap otherwise, as a matrix and its transpose, are put there one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from monarch_async.tensor.layout import Box, Item, Layout, shard_box, whole

__all__ = ["Only", "Part", "State", "TensorSlice", "block_view", "chooser", "memory_key", "pack", "parts_of"]

ALIGNMENT = 64  # bytes


class TensorSlice(NamedTuple):
    """A tensor that is a slice of a larger one, of `shape`, where its first element is at `offsets`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


State: TypeAlias = nn.Module | Mapping[str, Tensor | TensorSlice]
"""What can be published, and pulled into. A module stands for its ``state_dict()``."""
Only: TypeAlias = str | Callable[[str], bool] | None
"""Which keys: those that begin so, or for which this is true, or all."""


class Part(NamedTuple):
    """The share of this process in the tensor of one key."""

    tensor: Tensor
    shape: tuple[int, ...]
    box: Box


def chooser(only: Only) -> Callable[[str], bool]:
    """Whether a key is meant."""
    if only is None:
        return lambda key: True
    if isinstance(only, str):
        prefix = only
        return lambda key: key.startswith(prefix)
    return only


def parts_of(state: State) -> dict[str, Part]:
    """The parts of a module or dictionary, by key. Raises `TypeError` for what is no tensor, and `ValueError` for slices that can't be."""
    tensors: Mapping[str, Any] = state.state_dict() if isinstance(state, nn.Module) else state
    if not isinstance(tensors, Mapping):
        raise TypeError(f"a state is a module or a dictionary of tensors, not {type(state).__qualname__}")
    return {key: _part(key, value) for key, value in tensors.items()}


def _part(key: str, value: Any) -> Part:
    if isinstance(value, TensorSlice):
        return _slice(key, value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{key!r} is no tensor but a {type(value).__qualname__}: leave it out, and send it in a message")
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        return _distributed(key, value, distributed)
    return Part(_dense(key, value), tuple(value.shape), whole(value.shape))


def _slice(key: str, given: TensorSlice) -> Part:
    shape, box = tuple(given.shape), Box(tuple(given.offsets), tuple(given.tensor.shape))
    fits = len(shape) == len(box.offsets) == len(box.shape)
    if not fits or any(first < 0 or first + size > total for first, size, total in zip(box.offsets, box.shape, shape, strict=True)):
        raise ValueError(f"{key!r}: a slice of shape {box.shape} at {box.offsets} is not within a tensor of shape {shape}")
    return Part(_dense(key, given.tensor), shape, box)


def _distributed(key: str, tensor: Any, distributed: Any) -> Part:
    axes: list[int | None] = []
    for placement in tensor.placements:
        # By type and not by class: some that are derived from Shard deal the elements out in another order.
        if type(placement) is distributed.Shard:
            axes.append(placement.dim % tensor.ndim)
        elif type(placement) is distributed.Replicate:
            axes.append(None)
        else:
            raise ValueError(
                f"{key!r}: a DTensor placed as {placement} has no slice of its own here: redistribute it to Shard or Replicate"
            )
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{key!r}: this rank is not in the mesh of its DTensor")
    box = shard_box(tensor.shape, mesh.shape, coordinate, axes)
    if tuple(local.shape) != box.shape:
        raise ValueError(f"{key!r}: the DTensor's share has the shape {tuple(local.shape)} and should have {box.shape}: shard it evenly")
    return Part(_dense(key, local), tuple(tensor.shape), box)


def _dense(key: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"{key!r} has no plain memory (device {tensor.device}, layout {tensor.layout}): give a dense tensor")
    return tensor.detach()


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory in the same order."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def pack(parts: Mapping[str, Part]) -> tuple[Layout, list[tuple[int, Tensor]]]:
    """Where each part shall be in a block, and what has to be copied to which byte of it."""
    places: dict[tuple[Any, ...], int] = {}
    copies: list[tuple[int, Tensor]] = []
    end = 0
    around: tuple[torch.device, int, int, int] | None = None  # the last one without gaps: device, address, end of its bytes, offset
    for part in sorted(parts.values(), key=_first_and_largest):
        tensor = part.tensor
        key, size = memory_key(tensor), tensor.numel() * tensor.element_size()
        if not size or key in places:
            continue
        address, dense = tensor.data_ptr(), tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if dense and around is not None and _within(around, tensor, address, size):
            places[key] = around[3] + address - around[1]
            continue
        places[key] = end
        copies.append((end, tensor))
        if dense:
            around = (tensor.device, address, address + size, end)
        end += size + -size % ALIGNMENT
    items = {
        key: Item(_name(part.tensor.dtype), part.shape, part.box, places.get(memory_key(part.tensor), 0)) for key, part in parts.items()
    }
    return Layout(items, end), copies


def _within(around: tuple[torch.device, int, int, int], tensor: Tensor, address: int, size: int) -> bool:
    device, first, end, _ = around
    return device == tensor.device and first <= address and address + size <= end and not (address - first) % tensor.element_size()


def _first_and_largest(part: Part) -> tuple[str, int, int]:
    """What lies in another comes after it."""
    tensor = part.tensor
    return str(tensor.device), tensor.data_ptr(), -tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def block_view(block: Tensor, item: Item) -> Tensor:
    """The tensor of an item in a block, which is of bytes."""
    dtype: torch.dtype = getattr(torch, item.dtype)
    if not item.box.elements:
        return torch.empty(item.box.shape, dtype=dtype)
    return block[item.offset : item.offset + item.box.elements * dtype.itemsize].view(dtype).view(item.box.shape)
