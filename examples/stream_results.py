"""Results as they arrive, not when the last is there: words of the standard library's source code, counted by several processes.

    python examples/stream_results.py

Each process counts a share of the files. `stream` gives each answer as soon as it comes, the fastest first.
"""

from __future__ import annotations

import asyncio
import re
import sysconfig
import time
from collections import Counter
from pathlib import Path

from monarch_async import Actor, current_rank, current_size, endpoint, this_host

COUNTERS = 3
FILES = 90
WORD = re.compile(r"[A-Za-z_]+")


class WordCounter(Actor):
    @endpoint
    def count(self, files: list[str]) -> tuple[int, int, Counter[str]]:
        """Rank, how many files, and the words of this one's share."""
        rank = current_rank().rank
        share = files[rank :: current_size()["counters"]]
        words: Counter[str] = Counter()
        for file in share:
            words.update(WORD.findall(Path(file).read_text(encoding="utf-8", errors="replace")))
        return rank, len(share), words


async def main(files: list[str]) -> None:
    total: Counter[str] = Counter()
    async with this_host().spawn_procs({"counters": COUNTERS}, name="counters") as procs:
        counters = procs.spawn("counters", WordCounter)
        await counters
        began = time.monotonic()
        async for rank, count, words in counters.count.stream(files):
            total += words
            print(f"after {1000 * (time.monotonic() - began):4.0f} ms: counter {rank} has read {count} files, {words.total():,} words")
    print(f"{total.total():,} words in {len(files)} files; most often: {', '.join(word for word, _ in total.most_common(5))}")


if __name__ == "__main__":
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
    asyncio.run(main([str(module) for module in modules]))
