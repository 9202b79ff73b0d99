"""Tensors of every kind between processes of one host, large enough to be lent: equal, shared as they were, and nobody else's."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from monarch_async import Actor, endpoint, this_host
from monarch_async._channel.segment import SUPPORTED
from tests.api.lending_actors import lending_here, loans_here
from tests.api.waiting import until

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)} - QUANTISED, key=str)
NUMBER = 40_000


class Mirror(Actor):
    """Sends back what it gets, after a look at it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def keep(self, value: Any) -> None:
        self.kept.append(value)

    @endpoint
    async def add(self, number: float) -> list[float]:
        """To all that is kept; the sums."""
        for tensor in self.kept:
            tensor.add_(number)
        return [float(tensor.sum()) for tensor in self.kept]

    @endpoint
    async def collect(self) -> None:
        gc.collect()

    @endpoint
    async def drop(self) -> None:
        self.kept.clear()


def raw(tensor: Any) -> bytes:
    """The elements' bytes in order, for dtypes that can't be compared."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.element_size()]
    packed = tensor.detach().resolve_conj().resolve_neg().view(plain).contiguous()
    return ctypes.string_at(packed.data_ptr(), packed.numel() * packed.element_size()) if packed.numel() else b""


def same(left: Any, right: Any) -> bool:
    return bool((type(left), left.dtype, left.shape) == (type(right), right.dtype, right.shape) and raw(left) == raw(right))


class Named(torch.Tensor):  # type: ignore[misc, name-defined]
    """A subclass."""


async def _check_every_dtype_and_layout(both: Any) -> None:
    """Every element type, and views of every kind; among them empty ones and some without dimensions; alone and together."""
    tensors = []
    for dtype in DTYPES:
        base = torch.randint(0, 256, (NUMBER * 16,), dtype=torch.uint8)
        if dtype is torch.bool:
            base.remainder_(2)
        tensor = base.view(dtype)
        tensors += [tensor, tensor[::3], tensor[7:], tensor[:0], tensor[5]]
    matrix = torch.arange(300 * 400.0).reshape(300, 400)
    tensors += [matrix.T, matrix[:, 3], matrix[10:20, ::7], matrix.unsqueeze(0).expand(5, 300, 400), matrix[0, 0]]
    tensors += [torch.randn(NUMBER, dtype=torch.complex64).conj(), torch.view_as_real(torch.randn(NUMBER, dtype=torch.complex64))]
    tensors += [matrix.to_sparse(), torch.nn.Parameter(matrix.clone()), matrix.clone().requires_grad_(), matrix.as_subclass(Named)]
    one = both.slice(procs=0)
    for index, tensor in enumerate(tensors):
        back = await one.echo.call_one(tensor)
        if tensor.layout is not torch.strided:
            assert torch.equal(tensor.to_dense(), back.to_dense())
            continue
        assert same(tensor, back), index
        assert (tensor.requires_grad, tensor.is_leaf) == (back.requires_grad, back.is_leaf)
    strided = [tensor.detach() for tensor in tensors if tensor.layout is torch.strided]
    for left, back in zip(strided, await one.echo.call_one(strided), strict=True):
        assert same(left, back)
    del back


async def _check_what_shares_memory_still_does(both: Any) -> None:
    """Any views of one storage, a state dict with tied weights, storages themselves: a write through one shows where it did."""
    examples = [_example(seed) for seed in range(25)]
    one = both.slice(procs=0)
    for parts in examples:
        arrived = await one.echo.call_one(parts)
        for written, (here, there) in enumerate(zip(parts, arrived, strict=True), 1):
            here.fill_(written)
            there.fill_(written)
            assert all(map(torch.equal, parts, arrived))
        del arrived, there
    weight = torch.nn.Parameter(torch.randn(200, 200))
    state = {"in": weight, "out": weight, "row": weight.detach()[3], "other": torch.randn(NUMBER), "step": torch.tensor(3)}
    back = await one.echo.call_one(state)
    assert back["in"] is back["out"]
    with torch.no_grad():
        back["in"].fill_(2)
    assert 2 == back["row"][0]
    storage = await one.echo.call_one(state["other"].untyped_storage())
    assert raw(state["other"]) == bytes(storage)
    del back, storage


def _example(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    base = torch.arange(100_000)
    parts = []
    for _ in range(number(1, 5)):
        start = number(0, 99_999)
        parts.append(base[start : number(start, 100_001) : number(1, 6)])
    return parts


async def _check_what_arrives_is_ones_own(both: Any) -> None:
    """What a receiver writes is seen neither by the sender nor by another receiver; nor is what the sender writes later."""
    tensor = torch.ones(1_000_000)
    await both.keep.call(tensor)
    tensor.fill_(5)
    first, second = both.slice(procs=0), both.slice(procs=1)
    assert [2_000_000.0] == await first.add.call_one(1)
    assert [1_000_000.0] == await second.add.call_one(0)
    assert 5_000_000 == tensor.sum()
    await both.drop.call()
    for turn in range(5):
        await both.keep.call(torch.full((1_000_000,), float(turn)))
        assert [(turn + 1) * 1e6] == await first.add.call_one(1)
        assert [turn * 1e6] == await second.add.call_one(0)
        await both.drop.call()


async def _check_gradients_flow_into_what_arrives(both: Any) -> None:
    """A received tensor is an ordinary one: a computation with it, its gradient, an optimiser's step in place."""
    one = both.slice(procs=0)
    weight = await one.echo.call_one(torch.nn.Parameter(torch.ones(300, 300)))
    batch = await one.echo.call_one(torch.full((10, 300), 2.0).repeat(10, 1))
    loss = (batch @ weight).sum()
    loss.backward()
    assert torch.equal(torch.full((300, 300), 200.0), weight.grad)
    torch.optim.SGD([weight], lr=0.5).step()
    assert torch.equal(torch.full((300, 300), -99.0), weight.detach())
    del weight, batch, loss


async def test_tensors_of_every_kind() -> None:
    """See the checks above; all of it in the same two processes, since torch takes long to load. In the end all that was lent is back."""
    procs = this_host().spawn_procs({"procs": 2}, preload=("torch",))
    both = procs.spawn("mirrors", Mirror)
    await both.echo.call(None)
    await _check_every_dtype_and_layout(both)
    await _check_what_shares_memory_still_does(both)
    await _check_what_arrives_is_ones_own(both)
    await _check_gradients_flow_into_what_arrives(both)
    gc.collect()
    await both.collect.call()
    await until(lambda: not loans_here() and not lending_here().borrowing._leased)
    assert lending_here().pool.allocated
