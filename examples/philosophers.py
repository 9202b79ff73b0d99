"""Dining philosophers: each an actor in a process of its own, and a waiter who lends the forks.

    python examples/philosophers.py

A philosopher needs both forks beside the plate. The waiter lends both or none, so that nobody holds one fork and waits for the other (no
deadlock), and serves whoever asked first among those whose forks are free, unless a neighbour has waited longer (nobody starves).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from monarch_async import Actor, Port, current_rank, endpoint, this_host


class Waiter(Actor):
    """Answers a request for forks once they are free: the answer goes through a port, whenever it is time."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.eating: set[int] = set()
        self.queue: list[tuple[int, Port[None]]] = []

    @endpoint(explicit_response_port=True)
    async def take_forks(self, port: Port[None], seat: int) -> None:
        self.queue.append((seat, port))
        self.serve()

    @endpoint
    async def put_back(self, seat: int) -> None:
        self.eating.remove(seat)
        self.serve()

    def serve(self) -> None:
        """In the order of asking. Who has to wait keeps neighbours who asked later from going first."""
        busy = set(self.eating)
        waiting = []
        for seat, port in self.queue:
            if busy.isdisjoint(self.neighbours(seat)):
                self.eating.add(seat)
                port.send(None)
            else:
                waiting.append((seat, port))
            busy.add(seat)
        self.queue = waiting

    def neighbours(self, seat: int) -> set[int]:
        return {(seat - 1) % self.seats, (seat + 1) % self.seats}


class Philosopher(Actor):
    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter

    @endpoint
    async def dine(self, meals: int) -> int:
        """Think and eat by turns; how often this one ate."""
        seat = current_rank()["seats"]
        chance = random.Random(seat)
        eaten = 0
        for _ in range(meals):
            await asyncio.sleep(chance.uniform(0, 0.004))  # thinking
            await self.waiter.take_forks.call_one(seat)
            await asyncio.sleep(chance.uniform(0, 0.004))  # eating
            eaten += 1
            await self.waiter.put_back.call_one(seat)
        return eaten


async def main(seats: int, meals: int) -> int:
    procs = this_host().spawn_procs({"seats": seats}, name="table")
    kitchen = this_host().spawn_procs(name="kitchen")
    async with procs, kitchen:
        waiter = kitchen.spawn("waiter", Waiter, seats)
        philosophers = procs.spawn("philosophers", Philosopher, waiter)
        async with asyncio.timeout(60):
            eaten = await philosophers.dine.call(meals)
    for point, count in eaten:
        print(f"philosopher {point['seats']} ate {count} times")
    everyone_ate = all(count == meals for count in eaten.values())
    print("nobody starved" if everyone_ate else "FAILED: somebody went hungry")
    return 0 if everyone_ate else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Dining philosophers.")
    parser.add_argument("--seats", type=int, default=4, help="at least 2")
    parser.add_argument("--meals", type=int, default=50)
    options = parser.parse_args()
    if options.seats < 2:
        parser.error("a table with shared forks has at least 2 seats")
    sys.exit(asyncio.run(main(options.seats, options.meals)))
