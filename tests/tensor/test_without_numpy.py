"""The extra `torch` is all that tensors need: in processes where NumPy can't be imported they are sent, published, pulled and summed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys, warnings

warnings.simplefilter("ignore")  # torch says that it is missing
import torch
from monarch_async import Actor, configure, endpoint, shared_empty, shutdown, this_host
from monarch_async.tensor import StateDict, TensorActor
from monarch_async.tensor.inline import pack, unpack

DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
DTYPES = [kind for kind in DTYPES if not any(word in str(kind) for word in ("quint", "qint", "bits", "float4"))]
DTYPES = [kind for kind in DTYPES if str(kind) not in {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}]

def bytes_of(tensor):
    flat = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    return flat.tolist()

def samples():
    for kind in DTYPES:
        torch.manual_seed(0)
        raw = torch.randint(0, 2 if kind is torch.bool else 256, (4096 * kind.itemsize,), dtype=torch.uint8)
        yield str(kind), raw.view(kind).reshape(64, 64)

class Other(Actor):
    @endpoint
    async def pull(self, handle, target):
        assert sys.modules.get("numpy") is None
        version = await handle.pull_into(target)
        pulled = await handle.pull()
        assert {key: bytes_of(tensor) for key, tensor in pulled.items()} == {key: bytes_of(tensor) for key, tensor in target.items()}
        return version, target

class Member(TensorActor):
    @endpoint
    async def sums(self):
        small = await self.comm.all_reduce(torch.full((4,), 1.0, dtype=torch.bfloat16))
        large = await self.comm.all_reduce(torch.full((40_000,), 1.0))
        return float(small.sum()), float(large.sum())

async def main():
    for kind, tensor in samples():
        for view in (tensor[:4, :4], tensor[:4, :4].t(), tensor[0, 0], tensor[:0]):
            back = unpack(pack(view), view.dtype, view.shape)
            assert bytes_of(back) == bytes_of(view), kind
    number = torch.tensor([1 + 2j, 3 - 1j])
    assert unpack(pack(number.conj()), number.dtype, (2,)).tolist() == [1 - 2j, 3 + 1j]
    state = dict(samples())
    assert {"torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2", "torch.complex64", "torch.bool"} <= set(state)
    other = this_host().spawn_procs(name="there", preload=("torch",)).spawn("other", Other)
    published = await StateDict.publish(state)
    for version in (1, 2):
        target = {key: torch.zeros_like(tensor, dtype=tensor.dtype) for key, tensor in state.items()}
        seen, back = await other.pull.call_one(published, target)
        assert seen == version
        assert {key: bytes_of(tensor) for key, tensor in back.items()} == {key: bytes_of(tensor) for key, tensor in state.items()}
        await published.update(state)
    shared = shared_empty(1000, 100).fill_(2.0)
    _, back = await other.pull.call_one(await StateDict.publish({"x": shared}, name="shared"), {"x": torch.zeros(1000, 100)})
    assert back["x"].sum() == 200_000
    members = this_host().spawn_procs({"gpus": 2}, name="two", preload=("torch",)).spawn("members", Member)
    assert [value for _, value in (await members.sums.call()).items()] == [(8.0, 80_000.0)] * 2
    await shutdown()
    configure(segment_bytes=1 << 16)
    published = await StateDict.publish(state)
    assert {key: bytes_of(tensor) for key, tensor in (await published.pull()).items()} == {key: bytes_of(t) for key, t in state.items()}
    await shutdown()
    print("right")

asyncio.run(main())
"""


def test_all_of_it(tmp_path: Path) -> None:
    """Every dtype that torch can view as bytes, bfloat16 and float8 among them, here and in other processes."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is no NumPy', name='numpy')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], env=environment, capture_output=True, text=True, timeout=120)
    assert "right\n" == done.stdout, done.stderr
