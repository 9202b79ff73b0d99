"""An asynchronous parameter server: workers pull weights, compute gradients on data of their own, and push them, at their own pace.

    python examples/parameter_server.py

The problem is a least-squares fit whose solution is known: the error of the fit is checked, and the exit status is 1 if it is too large.
"""

from __future__ import annotations

import asyncio
import sys

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError:
    sys.exit("numpy is not installed; in the project's folder: python3 -m pip install -e '.[examples]'")

from monarch_async import Actor, current_rank, endpoint, this_host

WORKERS = 2
STEPS = 300
FEATURES = 20
NOISE = 0.01
LARGEST_ERROR = 0.01

Array = NDArray[np.float64]


class ParameterServer(Actor):
    """Holds the weights. Handles one message at a time, so no lock is needed."""

    def __init__(self, size: int, learning_rate: float) -> None:
        self.weights = np.zeros(size)
        self.learning_rate = learning_rate
        self.pushes = 0

    @endpoint
    async def pull(self) -> Array:
        return self.weights

    @endpoint
    async def push(self, gradient: Array) -> None:
        # A new array: an answer to a pull may still be on its way out of the old one.
        self.weights = self.weights - self.learning_rate * gradient
        self.pushes += 1

    @endpoint
    async def count(self) -> int:
        return self.pushes


class Worker(Actor):
    """Has noisy measurements of its own, and never waits for other workers."""

    def __init__(self, server: ParameterServer, truth: Array) -> None:
        self.server = server
        self.truth = truth

    @endpoint
    async def work(self, steps: int) -> None:
        random = np.random.default_rng(current_rank().rank)
        inputs = random.normal(size=(400, len(self.truth)))
        outputs = inputs @ self.truth + NOISE * random.normal(size=len(inputs))
        for _ in range(steps):
            weights = await self.server.pull.call_one()
            rows = random.integers(len(inputs), size=64)
            gradient = inputs[rows].T @ (inputs[rows] @ weights - outputs[rows]) / len(rows)
            # No answer is wanted; awaiting it waits only while too much is under way.
            await self.server.push.broadcast(gradient)


async def main() -> int:
    truth = np.random.default_rng(12345).normal(size=FEATURES)
    host = this_host()
    async with host.spawn_procs(name="server") as server_proc, host.spawn_procs({"workers": WORKERS}, name="workers") as procs:
        server = server_proc.spawn("server", ParameterServer, FEATURES, learning_rate=0.05)
        workers = procs.spawn("workers", Worker, server, truth)
        before = float(np.abs(await server.pull.call_one() - truth).max())
        await workers.work.call(STEPS)
        error = float(np.abs(await server.pull.call_one() - truth).max())
        print(f"{WORKERS} workers pushed {await server.count.call_one()} gradients")
    print(f"largest error of a weight: {before:.3f} → {error:.5f}")
    if error > LARGEST_ERROR:
        print(f"FAILED: it was to be at most {LARGEST_ERROR}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
