"""A mesh with a restart policy has the type of its class, as one without."""

from typing import assert_type

from monarch_async import Actor, Restart, Supervisor, endpoint, this_host


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.count = start

    @endpoint
    async def add(self, number: int) -> int:
        self.count += number
        return self.count


async def use() -> None:
    procs = this_host().spawn_procs(restart=Restart(max_restarts=1))
    counter = procs.spawn("counter", Counter, 1, restart=Restart(mode="transient", backoff=0.1))
    assert_type(counter, Counter)
    assert_type(procs.spawn("counter", Counter, 1), Counter)
    assert_type(await counter.add.call_one(1), int)
    async with Supervisor(Restart(strategy="rest_for_one")) as group:
        assert_type(group.supervise(counter), Counter)
    Restart(mode="always")  # type: ignore[arg-type]
    procs.spawn("counter", Counter, 1, restart=3)  # type: ignore[call-arg]
