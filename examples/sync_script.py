"""A plain synchronous script: no event loop in sight, `.get()` waits for an answer, and threads may all call.

    python examples/sync_script.py

The runtime lives in a loop of its own, in a background thread, and ends with the program.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from monarch_async import Actor, endpoint, this_host


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, number: int) -> int:
        self.value += number
        return self.value

    @endpoint
    def value_now(self) -> int:
        return self.value


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 2}, name="counters")
    counters = procs.spawn("counters", Counter, 10)

    for point, value in counters.add.call(5).get():
        print(f"counter {point['gpus']} is at {value}")

    first = counters.slice(gpus=0)
    pending = [first.add.call_one(1) for _ in range(100)]  # sent at once, in order
    print(f"a hundred calls later: {pending[-1].get()}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: counters.add.call(number).get(timeout=30), range(100)))
    values = list(counters.value_now.call().get().values())
    print(f"after four threads: {values}")
    assert values == [15 + 100 + sum(range(100)), 15 + sum(range(100))]


if __name__ == "__main__":
    main()
