"""Handwritten digits, learned three ways by two processes, with the same result to the last bit.

    python examples/ddp_digits.py

The data are scikit-learn's digits: 1,797 pictures of 8 by 8 points. Two `Learner`s hold equal copies of a small network and train it on
batches of their own, with the mean of both gradients:

* ddp: PyTorch's `DistributedDataParallel`, on the group of the actors' mesh;
* by hand: ``await comm.all_reduce(gradients, "mean")`` after ``backward()``;
* with a loss: the same as by hand, but one of the two processes is killed in the middle. The other one is told (`PeerLost`), keeps its
  state, and gives it to the new process.

All three end with the same weights, bit for bit: the learners do the same arithmetic in the same order, a sum of two numbers does not
depend on which comes first, and halving is exact. (With three learners or more the order in which a backend adds would show in the last
digits.) The exit status is 1 if the weights differ, or if fewer than 95 % of the pictures held out are recognised.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

try:
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
except ImportError as missing:
    sys.exit(f"{missing.name} is not installed; in the project's folder: python3 -m pip install torch==2.13.0 -e '.[torch,digits]'")

from monarch_async import Restart, current_rank, endpoint, this_host
from monarch_async.tensor import CollectiveError, PeerLost, TensorActor

LEARNERS = 2
STEPS = 300
ROWS = 32  # pictures in a learner's batch
HELD_OUT = 360
KILL_AT = 150  # step


class Outcome(NamedTuple):
    """How one way ended, at one learner."""

    loss: float
    accuracy: float
    digest: str  # equal only where every bit of every weight is
    told: str  # of what it was told in between


class Learner(TensorActor):
    """Holds a copy of the network. Whatever way it trains, step `n` does the same with the same weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # one core for each
        torch.manual_seed(0)  # the same weights everywhere
        data = load_digits()
        pictures, digits = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
        order = torch.randperm(len(digits))
        self.pictures, self.digits = pictures[order], digits[order]
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.steps = 0
        self.loss = 0.0
        self.told = ""

    def backward(self, model: torch.nn.Module) -> float:
        """Gradients of one batch, which step and rank decide."""
        random = torch.Generator().manual_seed(LEARNERS * self.steps + current_rank().rank)
        rows = torch.randint(HELD_OUT, len(self.digits), (ROWS,), generator=random)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(model(self.pictures[rows]), self.digits[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, loss: float) -> None:
        self.optimizer.step()
        self.loss = loss
        self.steps += 1

    @endpoint
    async def form(self) -> None:
        await self.comm.ready()

    @endpoint
    def with_ddp(self) -> None:
        """A plain method, which runs in a thread: DDP blocks the one that it is in."""
        model = DistributedDataParallel(self.model, process_group=self.comm.process_group)
        while self.steps < STEPS:
            self.update(self.backward(model))

    @endpoint
    async def by_hand(self, kill_at: int | None) -> None:
        """All gradients as one tensor, one operation a step. A member that is lost costs the step that was under way."""
        rank, together = current_rank().rank, False
        while self.steps < STEPS:
            try:
                if not together:
                    await self.catch_up()
                    together = True
                if self.steps == kill_at and rank == LEARNERS - 1 and not self.told:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = self.backward(self.model)
                gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])
                await self.comm.all_reduce(gradients, "mean")
            except (PeerLost, CollectiveError) as error:
                self.told = str(error)
                await self.comm.ready()
                together = False
                continue
            parts = torch.split(gradients, [parameter.numel() for parameter in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            self.update(loss)

    async def catch_up(self) -> None:
        """Who is behind, such as a new process, takes the state of one who is not."""
        steps = [int(steps) for steps in await self.comm.all_gather(torch.tensor([self.steps]))]
        source, me = steps.index(max(steps)), self.comm.rank
        behind = [rank for rank, done in enumerate(steps) if done < max(steps)]
        if me == source:
            state = {"steps": self.steps, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            for rank in behind:
                await self.comm.send_object(state, rank)
        if me in behind:
            state = await self.comm.recv_object(source)
            self.steps = state["steps"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.told = f"a new process, with the state of rank {source} at step {self.steps}"

    @endpoint
    async def outcome(self) -> Outcome:
        with torch.no_grad():
            right = self.model(self.pictures[:HELD_OUT]).argmax(1) == self.digits[:HELD_OUT]
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return Outcome(self.loss, right.float().mean().item(), digest.hexdigest(), self.told)


async def main() -> int:
    procs = this_host().spawn_procs({"learners": LEARNERS}, preload=["torch", "torch.distributed", "sklearn.datasets"])
    ways: dict[str, Callable[[Learner], Awaitable[Any]]] = {
        "ddp": lambda learners: learners.with_ddp.call(),
        "by hand": lambda learners: learners.by_hand.call(None),
        # A call that is lost with its process is made again in the next one.
        "with a loss": lambda learners: learners.by_hand.options(retry=1).call(KILL_AT),
    }
    outcomes = []
    print(f"{'way':<12} {'loss at 0':>11} {'loss at 1':>11} {'held out':>9} {'weights':>9} {'time':>7}")
    for name, train in ways.items():
        learners = procs.spawn(name.replace(" ", "_"), Learner, restart=Restart(max_restarts=3, within=60))
        await learners.form.call()
        began = time.monotonic()
        await train(learners)
        took = time.monotonic() - began
        first, second = (await learners.outcome.call()).values()
        await learners.stop()
        print(f"{name:<12} {first.loss:>11.8f} {second.loss:>11.8f} {first.accuracy:>9.1%} {first.digest[:8]:>9} {took:>5.1f} s")
        outcomes += [first, second]
    for rank, outcome in enumerate(outcomes[-2:]):
        print(f"rank {rank}: {outcome.told}")
    if len({outcome.digest for outcome in outcomes}) > 1:
        print("FAILED: the weights differ")
        return 1
    print("all weights are equal, bit for bit")
    return 0 if outcomes[0].accuracy >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
