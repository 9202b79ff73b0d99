"""A storm of faults over real processes under load, and an oracle that looks for a single broken promise.

    python perf/storm.py                     # 300 faults, some 40 s
    python perf/storm.py --faults 2000 --seed 7

Four worker processes, restarted by policy, answer calls and casts of this program and of each other, while faults come every 0.1 s:
processes are killed, exit, are frozen, are blocked; handlers raise; connections are reset, cut, torn, delayed, doubled. Every call is
journaled where it is handled and where it is awaited; see `perf/journal.py` for what is then looked for. At the end every rank has to
answer again, and nothing may be left: no process, descriptor, thread or segment. The exit status is 1 if anything was violated; the seed
repeats the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import monarch_async
from monarch_async import (
    Actor,
    ActorDied,
    ActorError,
    CallTimeout,
    MeshFailure,
    ProcMesh,
    Restart,
    concurrent_endpoint,
    context,
    endpoint,
    shutdown,
    this_host,
)
from monarch_async.testing.faults import Faults
from monarch_async.testing.leaks import LeakCheck, LeakError
from perf.journal import Journal, Outcome, Verdict, answer_to, judge, read

__all__ = ["Report", "main", "storm"]

PROCS, CALLERS, SENDERS = 4, 6, 2
EVERY = 0.1
"""Seconds between faults."""
TIMEOUT, LIMIT = 10.0, 20.0
"""Seconds: a call's own deadline, and after which it counts as never settled."""
SPARE = 5.0
"""Seconds after the last fault for those that wait for something to pass."""
KINDS = {
    "kill": 4,
    "exit": 2,
    "freeze": 2,
    "block": 2,
    "hold_gil": 1,
    "fail": 4,
    "reset": 3,
    "cut": 2,
    "drop": 2,
    "delay": 1,
    "duplicate": 1,
}
"""Kinds of faults and how often they come."""


class Worker(Actor):
    """Writes down what it handles."""

    def __init__(self, folder: str) -> None:
        instance = context().actor_instance
        self.journal = Journal(folder, instance.rank.rank, instance.incarnation)

    def __cleanup__(self, exc: BaseException | None) -> None:
        self.journal.close()

    @endpoint
    async def answer(self, number: int) -> int:
        self.journal.write("call", number)
        if not number % 5:
            await asyncio.sleep(0.002)
        return answer_to(number)

    @endpoint
    def compute(self, number: int) -> int:
        """The same in the actor's thread."""
        self.journal.write("call", number)
        return answer_to(number)

    @endpoint
    async def note(self, number: int, sender: int) -> None:
        self.journal.write("cast", number, sender)

    @endpoint
    async def stumble(self) -> None:
        """For a broadcast: the actor fails of it."""
        raise RuntimeError("stumbled")

    @concurrent_endpoint
    async def relay(self, number: int, other: Worker) -> int:
        """Ask another worker; concurrent, since two that wait for each other would wait for ever."""
        return await other.answer.options(timeout=TIMEOUT / 2).call_one(number)


class Report:
    """What a storm did, and what the oracle says."""

    def __init__(self) -> None:
        self.planned = 0
        self.injected: Counter[str] = Counter()
        self.outcomes: dict[int, Outcome] = {}
        self.sent: dict[int, list[int]] = {sender: [] for sender in range(SENDERS)}
        self.stumbles = 0
        self.verdict = Verdict([], [], [], [], [], [])
        self.given_up: list[str] = []
        self.took = 0.0

    @property
    def violations(self) -> int:
        return self.verdict.violations + len(self.given_up)

    def __str__(self) -> str:
        results = Counter("value" if isinstance(outcome.result, int) else outcome.result for outcome in self.outcomes.values())
        lines = [
            f"{sum(self.injected.values())} of {self.planned} faults in {self.took:.0f} s: {_listed(self.injected)}",
            f"{self.stumbles} casts that raised",
            f"{len(self.outcomes)} calls: {_listed(results)}; {sum(map(len, self.sent.values()))} casts",
        ]
        for name, texts in self.verdict._asdict().items():
            lines.append(f"{name}: {len(texts)}" + "".join(f"\n  {text}" for text in texts[:10]))
        if self.given_up:
            lines.append("given up: " + "\n".join(self.given_up))
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


class Load:
    """Calls and casts, until told to stop."""

    def __init__(self, workers: Worker, report: Report, seed: int) -> None:
        self.workers = workers
        self.report = report
        self.random = random.Random(seed)
        self.numbers = 0
        self.stop = False

    def _next(self) -> int:
        self.numbers += 1
        return self.numbers

    async def call(self) -> None:
        """One caller: one call after the other."""
        while not self.stop:
            number = self._next()
            retry = self.random.random() < 0.3
            rank, other = self.random.randrange(PROCS), self.random.randrange(PROCS)
            worker = self.workers.slice(procs=rank)
            adverbs = {"timeout": TIMEOUT, "retry": 2 if retry else 0}
            way = self.random.random()
            if way < 0.2 and other != rank:
                future = worker.relay.options(**adverbs).call_one(number, self.workers.slice(procs=other))
            elif way < 0.4:
                future = worker.compute.options(**adverbs).call_one(number)
            else:
                future = worker.answer.options(**adverbs).call_one(number)
            try:
                async with asyncio.timeout(LIMIT):
                    result: int | str = await future
            except TimeoutError as error:
                result = "CallTimeout" if isinstance(error, CallTimeout) else "unsettled"
            except (ActorDied, ActorError) as error:
                result = type(error).__name__
            self.report.outcomes[number] = Outcome(number, retry, result)

    async def cast(self, sender: int) -> None:
        """One sender of casts to all."""
        while not self.stop:
            number = self._next()
            self.report.sent[sender].append(number)
            await self.workers.note.broadcast(number, sender)
            await asyncio.sleep(0.005)

    async def trip(self) -> None:
        """Now and then a worker fails of a cast."""
        while not self.stop:
            await self.workers.slice(procs=self.random.randrange(PROCS)).stumble.broadcast()
            self.report.stumbles += 1
            await asyncio.sleep(4 * EVERY)


def plan(faults: Faults, count: int, seed: int) -> None:
    """So many faults, one after the other, at ranks and of kinds that the seed decides."""
    choose = random.Random(seed)
    kinds = choose.choices([*KINDS], [*KINDS.values()], k=count)
    for index, kind in enumerate(kinds):
        rank = choose.randrange(PROCS)
        where = faults.at(mesh="procs", rank=rank, time=1.0 + index * EVERY)
        seconds = choose.uniform(0.02, 0.4)
        link = where.link() if choose.random() < 0.5 else where.link(("procs", (rank + choose.randrange(1, PROCS)) % PROCS))
        match kind:
            case "kill":
                where.kill()
            case "exit":
                where.exit(choose.randrange(256))
            case "freeze":
                where.freeze(seconds)
            case "block":
                where.block(seconds)
            case "hold_gil":
                where.hold_gil(seconds)
            case "fail":
                faults.at(mesh="workers", rank=choose.randrange(PROCS), time=1.0 + index * EVERY).fail(text="the storm")
            case "reset":
                link.reset()
            case "cut":
                link.cut(seconds)
            case "drop":
                link.drop()
            case "delay":
                link.delay(0.05, seconds)
            case "duplicate":
                link.duplicate(2)


async def storm(count: int, seed: int, folder: str) -> Report:
    """Run it all; the journal is written to `folder`."""
    report = Report()

    def unhandled(failure: MeshFailure) -> None:
        report.given_up.append(str(failure))

    monarch_async.unhandled_fault_hook = unhandled
    began = time.monotonic()
    with Faults(seed) as faults:
        faults.expect("procs", PROCS)
        plan(faults, count, seed)
        report.planned = count
        procs: ProcMesh = this_host().spawn_procs({"procs": PROCS}, name="procs", bootstrap=faults.bootstrap)
        workers = await procs.spawn("workers", Worker, folder, restart=Restart(max_restarts=10_000, within=1.0))
        load = Load(workers, report, seed)
        tasks = [asyncio.create_task(load.call()) for _ in range(CALLERS)]
        tasks += [asyncio.create_task(load.cast(sender)) for sender in range(SENDERS)]
        tasks.append(asyncio.create_task(load.trip()))
        with contextlib.suppress(TimeoutError):  # a fault of a link that is not used any more, or whose process died first, never happens
            await faults.injected(count, timeout=1.0 + count * EVERY + SPARE)
        report.injected.update(entry.fault.kind for entry in faults.log)
        faults.calm()
        load.stop = True
        await asyncio.gather(*tasks)
        for rank in range(PROCS):  # after the storm, everybody is there
            number = load._next()
            result = await workers.slice(procs=rank).answer.options(timeout=TIMEOUT, retry=3).call_one(number)
            report.outcomes[number] = Outcome(number, True, result)
        await procs.stop()
    report.took = time.monotonic() - began
    report.verdict = judge(read(folder), report.outcomes, report.sent)
    return report


async def _main(count: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        check = LeakCheck()
        report = await storm(count, seed, folder)
        await shutdown()
        left = ""
        try:
            await check.wait_none()
        except LeakError as error:
            left = str(error)
    print(f"seed {seed}\n{report}")
    print(left or "left behind: nothing")
    return 1 if report.violations or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    return asyncio.run(_main(options.faults, options.seed))


if __name__ == "__main__":
    sys.exit(main())
