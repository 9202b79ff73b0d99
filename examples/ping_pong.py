"""Two meshes of processes whose actors ping each other directly.

    python examples/ping_pong.py

The controller only introduces them: messages go from process to process, and never through it.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from monarch_async import Actor, current_rank, endpoint, this_host


class Player(Actor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.hits = 0

    @endpoint
    async def hit(self, ball: int) -> int:
        """Take the ball and return it with one more touch."""
        self.hits += 1
        return ball + 1

    @endpoint
    async def rally(self, others: Player, rounds: int) -> int:
        """Play with the one of the same rank on the other side; how often the ball was touched."""
        partner = others.slice(players=current_rank()["players"])
        ball = 0
        for _ in range(rounds):
            ball = await partner.hit.call_one(ball + 1)
        return ball

    @endpoint
    async def score(self) -> int:
        return self.hits


async def main(pairs: int, rounds: int) -> None:
    host = this_host()
    async with host.spawn_procs({"players": pairs}, name="pings") as left, host.spawn_procs({"players": pairs}, name="pongs") as right:
        pings = left.spawn("pings", Player, "ping")
        pongs = right.spawn("pongs", Player, "pong")
        await pings
        await pongs

        began = time.monotonic()
        touches = await pings.rally.call(pongs, rounds)
        took = time.monotonic() - began

        for point, hits in await pongs.score.call():
            print(f"pair {point['players']}: pong hit the ball {hits} times, it was touched {touches.get(point.rank)} times")
        print(f"{pairs * rounds} round trips in {took:.2f} s: {pairs * rounds / took:,.0f} a second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Actors in two meshes of processes ping each other.")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    asyncio.run(main(options.pairs, options.rounds))
