"""Tensors arrive as they were, share what they shared, and are not copied on the way."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async._channel import tensors, torch_hook
from monarch_async._core import codec

torch = pytest.importorskip("torch")

SRC = Path(codec.__file__).parents[2]
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)} - QUANTISED, key=str)


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """As a runtime does it at its start; undone afterwards, so that other tests see a codec without tensors."""
    reducers = dict(codec._reducers)
    torch_hook.install()
    yield
    for kind in set(codec._reducers) - set(reducers):
        del codec._reducers[kind]
        codec._table.pop(kind, None)
    tensors._installed = False


@pytest.fixture(autouse=True)
def never_torch_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may go by `torch.save`."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch.save was called")

    monkeypatch.setattr(torch, "save", refuse)


def round_trip(value: Any) -> Any:
    body, buffers = codec.dumps(value)
    return codec.loads(body, [bytearray(view) for view in buffers])


def raw(tensor: Any) -> bytes:
    """The elements' bytes in order, for dtypes that can't be compared."""
    packed = tensor.detach().contiguous()
    return ctypes.string_at(packed.data_ptr(), packed.numel() * packed.element_size()) if packed.numel() else b""


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    assert (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device)
    assert raw(left) == raw(right)


@pytest.mark.parametrize("size", [3, 2000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: Any, size: int) -> None:
    """Every element type arrives bit for bit, in the body and beside it, without a warning."""
    tensor = torch.randint(0, 256, (size * 16,), dtype=torch.uint8).view(dtype)
    if dtype is torch.bool:
        tensor = tensor.view(torch.uint8).remainder(2).view(torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = round_trip(tensor)
        packed = round_trip(tensor[::3])
    same(tensor, arrived)
    assert [raw(item) for item in tensor[::3]] == [raw(item) for item in packed]


@st.composite
def layouts(draw: st.DrawFn) -> Any:
    """Views of all kinds of one storage: sliced, stepped, transposed, expanded, empty, without dimensions."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.int64, torch.bool]))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    base = torch.arange(1 + torch.Size(shape).numel() * 2).to(dtype)
    view = base[1 : 1 + torch.Size(shape).numel()].reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        if not view.dim():
            break
        dim = draw(st.integers(0, view.dim() - 1))
        kind = draw(st.sampled_from(["step", "select", "transpose", "expand", "narrow"]))
        if kind == "step":
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif kind == "select" and view.shape[dim]:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif kind == "transpose":
            view = view.transpose(dim, 0)
        elif kind == "expand":
            view = view.unsqueeze(dim).expand([3 if index == dim else -1 for index in range(view.dim() + 1)])
        elif kind == "narrow" and view.shape[dim]:
            view = view.narrow(dim, 0, draw(st.integers(1, view.shape[dim])))
    return view


@given(st.lists(layouts(), min_size=1, max_size=3))
@settings(deadline=None)
def test_every_layout(views: Any) -> None:
    """Any view arrives equal, alone or with others, and after a copy within the process."""
    for arrived in (round_trip(views), codec.copy_value(views), codec.loads(codec.dumps_whole(views))):
        for left, right in zip(views, arrived, strict=True):
            same(left, right)


@given(st.data())
@settings(deadline=None)
def test_overlapping_views_stay_shared(data: st.DataObject) -> None:
    """Whatever views of one storage travel together, a write through one shows in every other where it did at the sender."""
    base = torch.zeros(60)
    views = []
    for _ in range(data.draw(st.integers(2, 5))):
        start = data.draw(st.integers(0, 59))
        step = data.draw(st.integers(1, 7))
        views.append(base[start : data.draw(st.integers(start, 60)) : step])
    arrived = round_trip(views)
    for written, (here, there) in enumerate(zip(views, arrived, strict=True), 1):
        here.fill_(written)
        there.fill_(written)
        for left, right in zip(views, arrived, strict=True):
            assert left.tolist() == right.tolist()


def test_large_tensor_is_not_copied_at_the_sender() -> None:
    """The buffer to send is the tensor's own memory, and keeps it alive."""
    tensor = torch.arange(10_000.0)
    body, buffers = codec.dumps(tensor)
    assert len(body) < 300
    tensor[0] = 5
    copied = bytearray(buffers[0])
    expected = tensor.clone()
    del tensor
    assert bytes(copied) == bytes(buffers[0])
    assert torch.equal(expected, codec.loads(body, [copied]))


def test_received_tensor_lies_in_the_buffer() -> None:
    """At the receiver the tensor is a writable view of what arrived."""
    body, buffers = codec.dumps(torch.zeros(10_000))
    received = bytearray(buffers[0])
    tensor = codec.loads(body, [received])
    tensor[0] = 1.0
    assert b"\x00\x00\x80\x3f" == received[:4]


def test_read_only_or_badly_aligned_buffers_are_copied() -> None:
    """Where the received memory can't be used as it is, the tensor is writable and right all the same, without a warning."""
    tensor = torch.arange(10_000.0)
    body, buffers = codec.dumps(tensor)
    shifted = memoryview(bytearray(3) + bytes(buffers[0]))[3:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for buffer in (bytes(buffers[0]), shifted):
            arrived = codec.loads(body, [buffer])
            assert torch.equal(tensor, arrived)
            arrived += 1
            assert 0 == arrived.data_ptr() % 16
    assert bytes(buffers[0]) == bytes(shifted)


def test_small_view_of_a_huge_storage() -> None:
    """A view sends its stretch, a column is packed, and the rest of the storage stays at home."""
    base = torch.randn(1000, 1000)
    for view, limit in ((base[3, :10], 300), (base[:, 7], 4300), (base[2:4], 8300)):
        body, buffers = codec.dumps(view)
        assert codec.size_of(body, buffers) < limit
        same(view, round_trip(view))


def test_shared_storage_is_sent_once() -> None:
    """Tensors that share memory are sent once and share it afterwards, whichever comes first."""
    base = torch.randn(100_000)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        parts = (base, base[100:200], base[::3])
        sent = [parts[index] for index in order]
        body, buffers = codec.dumps(sent)
        assert codec.size_of(body, buffers) < base.nbytes + 1000
        arrived = codec.loads(body, [bytearray(view) for view in buffers])
        whole = arrived[order.index(0)]
        whole.zero_()
        assert all(not tensor.any() for tensor in arrived)


def test_views_of_several_dtypes() -> None:
    """Views of one storage by other element types stay shared, from odd offsets too."""
    base = torch.arange(64, dtype=torch.uint8)
    first, second = round_trip((base[3:40], base[8:24].view(torch.float32)))
    assert list(range(3, 40)) == first.tolist()
    first.zero_()
    assert not second.any()


def test_state_dict_and_module() -> None:
    """A module arrives whole: Parameters are Parameters, tied weights stay tied, buffers and training mode are kept."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.eval()
    body, buffers = codec.dumps(model)
    assert 1 == len(buffers)
    arrived = codec.loads(body, [bytearray(view) for view in buffers])
    assert arrived[0].weight is arrived[2].weight
    assert type(arrived[0].weight) is torch.nn.Parameter
    assert (True, False) == (arrived[0].weight.requires_grad, arrived[0].bias.requires_grad)
    assert not arrived.training
    inputs = torch.randn(4, 200)
    assert torch.equal(model(inputs), arrived(inputs))
    arrived(inputs).sum().backward()
    assert arrived[0].weight.grad is not None

    states = round_trip(model.state_dict())
    assert list(model.state_dict()) == list(states)
    states["0.weight"].zero_()
    assert not states["2.weight"].any()


def test_optimiser_state() -> None:
    """An optimiser's state, with its nesting of tensors and numbers, survives."""
    model = torch.nn.Linear(4, 4)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimiser.step()
    assert str(optimiser.state_dict()) == str(round_trip(optimiser.state_dict()))


def test_gradients_stay_at_home() -> None:
    """A leaf keeps `requires_grad` but not `grad`; what was computed arrives detached."""
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    arrived, computed = round_trip((leaf, leaf * 3))
    assert (True, True, None) == (arrived.requires_grad, arrived.is_leaf, arrived.grad)
    assert (False, [3.0, 3.0, 3.0]) == (computed.requires_grad, computed.tolist())


def test_lazy_conjugate_and_negative() -> None:
    """Values that torch has only marked as conjugated or negated are sent as what they are."""
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in (tensor.conj(), tensor.conj().imag):
        assert view.tolist() == round_trip(view).tolist()


def test_attributes() -> None:
    """Python attributes go along, also one that refers back."""
    tensor = torch.ones(2)
    tensor.label = "x"
    tensor.itself = [tensor]
    arrived = round_trip(tensor)
    assert "x" == arrived.label
    assert arrived is arrived.itself[0]


class Marked(torch.Tensor):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(50).to_sparse(),
        lambda: torch.eye(50).to_sparse_csr(),
        lambda: torch.empty(3, 4, device="meta"),
        lambda: torch.ones(5000).as_subclass(Marked),
    ],
    ids=["sparse", "csr", "meta", "subclass"],
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_other_kinds_go_by_torchs_own_way(make: Any) -> None:
    """Sparse, meta and subclassed tensors survive, without `torch.save`."""
    tensor = make()
    arrived = round_trip(tensor)
    assert (type(tensor), tensor.layout, tensor.shape, tensor.device) == (type(arrived), arrived.layout, arrived.shape, arrived.device)
    if tensor.device.type != "meta":
        assert tensor.to_dense().tolist() == arrived.to_dense().tolist()


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:.*quantized tensor creation", "ignore:TypedStorage is deprecated")
def test_quantised() -> None:
    """Quantised tensors keep scale and zero point. (The warnings are torch's about itself.)"""
    tensor = torch.quantize_per_tensor(torch.arange(9000.0), 0.5, 3, torch.qint8)
    arrived = round_trip(tensor)
    assert (0.5, 3) == (arrived.q_scale(), arrived.q_zero_point())
    assert torch.equal(tensor.int_repr(), arrived.int_repr())


def test_storages() -> None:
    """A storage travels like a tensor over all of it, and shares with the tensors that lie in it."""
    tensor = torch.arange(5000.0)
    storage, view, empty = round_trip((tensor.untyped_storage(), tensor[10:20], torch.UntypedStorage(0)))
    assert bytes(tensor.untyped_storage()) == bytes(storage)
    view.zero_()
    assert 40 == bytes(storage)[40:80].count(0)
    assert 0 == empty.nbytes()


def test_freed_storage_is_refused() -> None:
    """A tensor whose memory was given back (as FSDP does) is refused, not read out of bounds."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="freed or shrunk to 0 bytes"):
        codec.dumps({"weight": tensor})


def test_default_device_does_not_matter() -> None:
    """A receiver with another default device gets the tensor where it was."""
    body, buffers = codec.dumps(torch.arange(5000.0))
    with torch.device("meta"):
        arrived = codec.loads(body, [bytearray(view) for view in buffers])
    assert torch.arange(5000.0).tolist() == arrived.tolist()


def test_pickle_copy_and_save_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pickles of tensors, `copy` and `torch.save` don't notice the reducers."""
    monkeypatch.undo()
    tensor = torch.arange(3.0)
    assert b"monarch" not in pickle.dumps(tensor)
    assert tensor.tolist() == copy.deepcopy(tensor).tolist()
    file = io.BytesIO()
    torch.save(tensor, file)
    assert tensor.tolist() == torch.load(io.BytesIO(file.getvalue())).tolist()


def test_by_value_functions_with_tensors() -> None:
    """A closure over a tensor goes by value and the tensor by its reducer."""
    weights = torch.arange(5000.0)
    body, buffers = codec.dumps(lambda: weights.sum())
    assert [20_000] == [view.nbytes for view in buffers]
    assert weights.sum() == codec.loads(body, [bytearray(view) for view in buffers])()


def test_threads() -> None:
    """Threads that send views of one storage at the same time don't see each other's blocks."""
    base = torch.arange(20_000.0)
    failures: list[int] = []

    def work(number: int) -> None:
        for turn in range(100):
            views = [base[number : number + 50], base[number + 25 :: 7], base[turn : turn + 9]]
            if any(left.tolist() != right.tolist() for left, right in zip(views, round_trip(views), strict=True)):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures


def test_torch_is_not_imported_before_its_time() -> None:
    """Installing imports no torch; once it is imported, the next message has the reducers; a receiver imports it when a tensor arrives."""
    code = """
import sys
from monarch_async._channel import tensors, torch_hook
from monarch_async._core import codec
torch_hook.install()
codec.dumps(1)
assert "torch" not in sys.modules and not tensors.ensure_reducers()
import torch
body, buffers = codec.dumps(torch.arange(3.0))
assert b"_rebuild_tensor" in body and b"monarch_async" in body
sys.stdout.buffer.write(body)
"""
    sent = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, timeout=60, check=True)
    code = "import sys; from monarch_async._core import codec; print(codec.loads(sys.stdin.buffer.read()).tolist())"
    received = subprocess.run(
        [sys.executable, "-c", code], input=sent.stdout, env={"PYTHONPATH": str(SRC)}, capture_output=True, timeout=60, check=True
    )
    assert b"[0.0, 1.0, 2.0]\n" == received.stdout


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    """CUDA tensors return to their device and share memory there as before."""
    base = torch.arange(100_000.0, device="cuda")
    whole, part = round_trip((base, base[10:20]))
    assert base.device == whole.device
    assert torch.equal(base, whole)
    whole.zero_()
    assert not part.any()


def test_device_that_is_not_here() -> None:
    """A tensor from a device that this process lacks arrives on one that it has."""
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert expected == tensors._rebuild_tensor(None, "float32", 0, (0, 3), (3, 1), False, False, "cuda:99").device.type


def test_a_sparse_tensor_is_not_kept() -> None:
    """Torch keeps what it rebuilds until it is validated, which only `torch.load` does: here it must go with its last reference."""
    arrived = round_trip(torch.eye(50).to_sparse())
    gone = weakref.ref(arrived)
    assert torch.equal(torch.eye(50), arrived.to_dense())
    del arrived
    assert gone() is None
