"""A job that gets stuck after some steps, to be looked into from another terminal: docs/console.md tells how.

    python examples/stuck.py

Its feeder reads from a server that stops answering. It does so on its event loop, which is the mistake; so it can't say anything any more,
and the trainers wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

from monarch_async import Actor, Restart, configure, current_rank, endpoint, this_host

ANSWERS = 6
"""What the first connection with the server gets, after which it gets nothing."""


class Feeder(Actor):
    """Fetches batches."""

    def __init__(self, port: int) -> None:
        self.source = socket.create_connection(("127.0.0.1", port))

    @endpoint
    async def batch(self) -> int:
        self.source.sendall(b"next\n")
        return self.read()

    def read(self) -> int:
        return int(self.source.recv(100))


class Trainer(Actor):
    """Makes steps."""

    def __init__(self, feeder: Any) -> None:
        self.feeder = feeder

    @endpoint
    async def step(self) -> float:
        batch: int = await self.feeder.batch.options(retry=1).call_one()
        await asyncio.sleep(0.1)
        return 1 / (batch + current_rank().rank)


async def make_server() -> asyncio.Server:
    """One that leaves its first client without an answer."""
    numbers, clients = itertools.count(1), itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        patience = ANSWERS if next(clients) == 0 else 1_000_000
        while await reader.readline():
            patience -= 1
            if patience >= 0:
                writer.write(b"%d\n" % next(numbers))
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1")


async def main() -> None:
    configure(job_name="train")
    async with await make_server() as server:
        port = server.sockets[0].getsockname()[1]
        feeder = this_host().spawn_procs(name="cpus", restart=Restart()).spawn("feeder", Feeder, port)
        trainers = this_host().spawn_procs({"gpus": 2}, name="gpus").spawn("trainer", Trainer, feeder)
        for number in itertools.count(1):
            losses = await trainers.step.call()
            print(f"step {number}: loss {sum(losses.values()) / 2:.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
