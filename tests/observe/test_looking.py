"""What `Job` says of a job in which something is wrong in every way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from monarch_async import Actor, MeshFailure, ProcState, Restart, UsageError, endpoint, this_proc
from monarch_async.observe.actors import _by_number
from monarch_async.observe.doctor import find_py_spy
from monarch_async.observe.errors import UnknownName
from monarch_async.observe.job import Job
from monarch_async.observe.records import Frame, to_json
from monarch_async.observe.survey import NoAnswer
from tests.observe.zoo import BUSY, CRASHED, FROZEN, IDLE, LOCKED, SLEEPING, SPINNING, Animal, Zoo, line_of

QUICK = 3.0
"""Seconds, on a machine that may be busy; perf/console.py has the figures."""
STATES = ["ready", "busy", "stuck", "stuck", "frozen", "stuck", "ready"]
ENDPOINTS = ["", "wait", "spin", "sleep", "wait", "lock", ""]


async def test_every_actor_is_listed_in_its_state(zoo: Zoo) -> None:
    """Also those whose processes don't answer, with the endpoint that they are in; a restart is counted. Quickly, all together."""
    await zoo.start()
    job = Job.here()
    await job.ps()  # what is loaded once is loaded
    start = time.monotonic()
    rows = await job.ps()
    assert time.monotonic() - start < QUICK
    assert [f"animals[{rank}]" for rank in range(7)] == [row.actor for row in rows]
    assert STATES == [row.state for row in rows]
    assert ENDPOINTS == [row.endpoint for row in rows]
    assert [0, 0, 0, 0, 0, 0, 1] == [row.restarts for row in rows]
    assert [f"cages[{rank}]" for rank in range(7)] == [row.process for row in rows]
    assert {"Animal"} == {row.class_name for row in rows}
    assert all(row.rss and row.rss > 1 << 20 and row.pid for row in rows)
    assert [rows[3]] == [row._replace(since=rows[3].since, rss=rows[3].rss) for row in await job.ps("animals[3]")]

    procs = {row.process: row for row in await job.procs()}
    assert {"agent", "client", *(f"cages[{rank}]" for rank in range(7))} == set(procs)
    assert os.getpid() == procs["client"].pid
    assert STATES == [procs[f"cages[{rank}]"].state for rank in range(7)]


async def test_the_stack_has_the_right_line(zoo: Zoo) -> None:
    """Whatever the process does, within a second, and it does it still afterwards."""
    await zoo.start(SPINNING, SLEEPING, LOCKED, FROZEN, BUSY)
    job = Job.here()
    for kind, name, text, source in (
        (SPINNING, "spin", "", "watchdog"),
        (SLEEPING, "sleep", "time.sleep", "watchdog"),
        (LOCKED, "lock", "PyDLL", "signal"),
        (FROZEN, "wait", "asyncio.sleep", "signal"),
        (BUSY, "wait", "asyncio.sleep", "itself"),
    ):
        start = time.monotonic()
        (row,) = await job.stack(f"animals[{kind}]")
        assert time.monotonic() - start < QUICK
        assert (source, STATES[kind]) == (row.source, row.state)
        last = row.text.splitlines()[-1]
        assert last.endswith(f"in {name}")
        first = line_of(name, text or "while True")
        lines = {first, first + 1} if kind == SPINNING else {first}
        assert any(f"line {line}, " in last for line in lines)
        (again,) = await job.stack(f"cages[{kind}]")
        assert STATES[kind] == again.state
        assert last.split(",")[0] == again.text.splitlines()[-1].split(",")[0]


async def test_a_frozen_process_stays_what_it_was(zoo: Zoo) -> None:
    """That its stack was taken is not seen in its health, and after it is thawed it goes on."""
    await zoo.start(FROZEN)
    job = Job.here()
    before = (await zoo.cages.slice(gpus=FROZEN).health()).item()
    await job.stack(f"cages[{FROZEN}]")
    after = (await zoo.cages.slice(gpus=FROZEN).health()).item()
    assert after.since > before.since
    assert "thawed" in (await job.thaw(f"cages[{FROZEN}]"))[0].text
    zoo.close()
    assert 4 == await zoo.one(FROZEN).eat.call_one()


async def test_who_waits_for_whom(zoo: Zoo) -> None:
    """Each call with its caller, endpoint and age, across processes; and the chain behind one of them, to the line that is to blame."""
    await zoo.start(SPINNING)
    waiting = asyncio.ensure_future(_waits(zoo.one(BUSY).wait_for.call_one(zoo.one(SPINNING))))
    job = Job.here()
    async with asyncio.timeout(10):
        while len(calls := await job.calls()) < 3:
            await asyncio.sleep(0.05)
    found = {(call.caller, call.actor, call.endpoint, call.blocks) for call in calls}
    assert ("animals[1].wait_for", "animals[2]", "spin", True) in found
    assert ("client", "animals[1]", "wait_for", True) in found
    await asyncio.sleep(1.2)
    old = await job.calls(older=0.6)
    assert {"animals[2]", "animals[1]"} <= {call.actor for call in old}
    assert all(call.age is not None and 0.6 <= call.age < 10 for call in old)
    assert [] == await job.calls(older=100)

    first, second = await job.where("animals[1]")
    assert ("animals[1]", "wait_for", "running", "animals[2]") == (first.actor, first.endpoint, first.state, first.waits_for)
    assert ["wait_for"] == [frame.function for frame in first.frames]
    assert line_of("wait_for", "await") == first.frames[0].line
    assert ("animals[2]", "spin", "stuck", "cages[2]") == (second.actor, second.endpoint, second.state, second.process)
    assert "spin" == second.frames[-1].function
    assert isinstance(second.frames[-1], Frame)
    waiting.cancel()


async def _waits(call: Any) -> None:
    await call


async def test_why_it_died(zoo: Zoo) -> None:
    """How its process ended, with its last words; by whom, where somebody did that."""
    await zoo.start(CRASHED)
    job = Job.here()
    (cause,) = await job.why(f"animals[{CRASHED}]")
    assert f"its process cages[{CRASHED}] exited with code 3" == cause.what
    assert "the last words" in cause.detail
    assert [] == await job.why("animals[0]")
    with pytest.raises(UsageError, match="has no restart policy") as refused:
        await job.restart("animals[1]")
    assert not getattr(refused.value, "__notes__", None)
    assert "the program: restart animals[1], which was refused" in [event.text for event in await job.events()]
    await job.kill("cages[1]")
    async with asyncio.timeout(10):
        while not (story := await job.why("animals[1]")):
            await asyncio.sleep(0.05)
    assert "killed by signal 9 (SIGKILL) on request: by the program" in story[0].what
    assert ["the program: kill cages[1]"] == [cause.what for cause in story[1:]]
    kinds = [event.kind for event in await job.events()]
    assert {"exited", "restarted", "write"} <= set(kinds)


async def test_why_an_actor_failed(zoo: Zoo, failures: list[MeshFailure]) -> None:
    """With the traceback, of one that fails of an exception; its siblings that go along, with whose failure they do."""
    group = zoo.cages.slice(gpus=slice(0, 2)).spawn("pair", Animal, restart=Restart(strategy="one_for_all"))
    await group
    await group.slice(gpus=0).fail.broadcast()
    job = Job.here()
    async with asyncio.timeout(10):
        while not (story := await job.why("pair[0]")):
            await asyncio.sleep(0.05)
    assert "ValueError in fail: on purpose" == story[0].what
    assert "line" in story[0].detail
    assert "on purpose" in story[0].detail


async def test_the_tree_has_policies_and_budgets(zoo: Zoo) -> None:
    """From the program down."""
    await zoo.start(CRASHED)
    program, cages, animals = await Job.here().tree()
    assert (0, "program", "client") == (program.depth, program.kind, program.name)
    assert (1, "processes", "cages", "permanent, one_for_one", 1, 3) == (*cages[:3], cages.policy, cages.used, cages.budget)
    assert (1, "actors", "animals", "Animal", 7, "") == (*animals[:5], animals.policy)


async def test_rates(zoo: Zoo) -> None:
    """Messages per second are counted while somebody looks, and only then; a stuck process uses a core."""
    await zoo.start(SPINNING)
    job = Job.here()
    done = asyncio.Event()

    async def feed() -> int:
        fed = 0
        while not done.is_set():
            await zoo.one(IDLE).eat.call_one()
            fed += 1
        return fed

    feeding = asyncio.ensure_future(feed())
    rows = {row.actor: row for row in await job.top(0.5)}
    done.set()
    assert rows["animals[0]"].handled is not None
    assert 10 < rows["animals[0]"].handled <= 4 * await feeding
    assert 0 == rows["animals[1]"].handled
    assert rows["animals[2]"].cpu is not None
    assert rows["animals[2]"].cpu > 0.1


async def test_state_output_links_and_letters(zoo: Zoo) -> None:
    """Attributes are cut to a bounded length; output is found; links and letters are listed."""
    job = Job.here()
    (state,) = await job.state("animals[0]")
    assert ("meals", "int", "3") == state.attributes[0]
    assert "password" == state.attributes[1][0]
    assert "(5002 characters)" in state.attributes[1][2]
    await zoo.animals.say.call("hello")
    async with asyncio.timeout(10):
        while len(lines := [line async for line in job.logs(grep="^hel+o$")]) < 7:
            await asyncio.sleep(0.05)
    assert [("cages[3]", 3, "hello")] == [tuple(line) for line in lines if line.rank == 3]
    followed = job.logs("cages[3]", follow=True)
    assert "hello" == (await anext(followed)).text
    await zoo.one(3).say.call_one("more")
    assert "more" == (await anext(followed)).text
    await followed.aclose()
    links = [link for link in await job.links() if link.process == "client" and link.peer == "cages[0]"]
    assert [("unix", True, 0)] == [(link.kind, link.connected, link.reconnects) for link in links]
    assert links[0].sent > 0
    assert [] == await job.deadletters()


async def test_a_trace_tells_the_next_messages(zoo: Zoo) -> None:
    """Endpoint, sender, size, duration and outcome of as many as asked for; then nothing of it is left."""
    job = Job.here()
    trace = job.trace("animals[0]", 3)
    first = asyncio.ensure_future(anext(trace))
    async with asyncio.timeout(10):
        while not first.done():
            await zoo.one(IDLE).eat.call_one(2)
            await asyncio.sleep(0.02)
    seen = await first
    assert ("animals[0]", "eat", "client[0]", "ok") == (seen.actor, seen.endpoint, seen.sender, seen.outcome)
    assert 0 < seen.size < 200
    assert 0 <= seen.duration < 1
    with pytest.raises(ValueError, match="on purpose"):
        await zoo.one(IDLE).fail.call_one()
    rest = asyncio.ensure_future(_all(trace))
    async with asyncio.timeout(10):
        while not rest.done():
            await zoo.one(IDLE).eat.call_one(2)
            await asyncio.sleep(0.02)
    assert 2 == len(await rest)
    assert "ValueError" == (await rest)[0].outcome
    assert "ok" == (await rest)[1].outcome


async def _all(rows: AsyncIterator[Any]) -> list[Any]:
    return [row async for row in rows]


async def test_what_is_written(zoo: Zoo) -> None:
    """An expression, a freeze, a thaw, a restart and a stop, each told; what has no policy is not restarted."""
    job = Job.here()
    (value,) = await job.eval("animals[0]", "await asyncio.sleep(0, self.meals * 2)")
    assert ("6", "int", "") == (value.value, value.type_name, value.error)
    (wrong,) = await job.eval("animals[0]", "self.nothing")
    assert "AttributeError" in wrong.error
    with pytest.raises(UsageError, match="is no expression"):
        await job.eval("animals[0]", "self.")
    await job.freeze("cages[1]")
    async with asyncio.timeout(10):
        while (await job.ps("animals[1]"))[0].state != "frozen":
            await asyncio.sleep(0.02)
    await job.thaw("cages[1]")
    async with asyncio.timeout(10):
        while (await job.ps("animals[1]"))[0].state != "ready":
            await asyncio.sleep(0.02)
    with pytest.raises(UsageError, match="has no restart policy"):
        await job.restart("animals[0]")
    before = await zoo.one(2).pid.call_one()
    await job.restart("cages[2]")
    assert before != await zoo.one(2).pid.options(retry=5).call_one()
    assert [("animals", "7 actors of client were stopped")] == [tuple(done) for done in await job.stop("animals")]
    assert [] == await job.ps()


async def test_a_name_of_actors_and_of_processes_is_not_stopped_by_guess(zoo: Zoo) -> None:
    """Which are meant has to be said; and only those are stopped."""
    job = Job.here()
    await zoo.cages.spawn("cages", Animal)
    with pytest.raises(UsageError, match="cages are actors and processes: say which with --kind"):
        await job.stop("cages")
    assert [("cages", "7 actors of client were stopped")] == [tuple(done) for done in await job.stop("cages", kind="actors")]
    assert {"animals"} == {row.actor.partition("[")[0] for row in await job.ps()}
    assert [("cages", "7 processes of client were stopped")] == [tuple(done) for done in await job.stop("cages")]


class Owner(Actor):
    """Owns a mesh, and does not answer."""

    @endpoint
    async def own(self) -> None:
        await this_proc().spawn("owned", Animal)

    @endpoint
    async def spin(self) -> None:
        while True:
            pass


async def test_an_owner_that_does_not_answer_is_told(zoo: Zoo) -> None:
    """Whether it is the only one who can stop a mesh, or may have another one of that name."""
    job = Job.here()
    owner = zoo.cages.slice(gpus=SPINNING).spawn("owner", Owner)
    await owner.own.call_one()
    spins = owner.spin.call_one()
    await zoo.until(SPINNING, ProcState.STUCK)
    with pytest.raises(NoAnswer, match=rf"owns owned; cages\[{SPINNING}\] does not answer: kill may help"):
        await job.stop("owned")
    texts = [done.text for done in await job.stop("animals")]
    assert ["7 actors of client were stopped", f"there may be more of that name: cages[{SPINNING}] does not answer"] == texts
    spins.cancel()


async def test_a_number_that_several_have(zoo: Zoo) -> None:
    """Is an error that names them, be it the pid of processes of two hosts, or a pid and a rank."""
    survey = Job.here()._survey
    procs = await survey.procs()
    cages = [proc for proc in procs if proc.kind == "proc"]
    other = cages[1]._replace(pid=cages[0].pid, host="elsewhere")
    with pytest.raises(UsageError, match=rf"cages\[0\] \(pid {other.pid} on .*cages\[1\] \(pid {other.pid} on elsewhere\): say which"):
        _by_number([cages[0], other], other.pid)
    with pytest.raises(UsageError, match=r"2 is cages\[0\] \(pid 2 on .*\) and cages\[2\] \(rank 2\)"):
        _by_number([cages[0]._replace(pid=2), *cages[1:]], 2)
    assert cages[3:4] == _by_number(procs, 3)
    assert cages[4:5] == _by_number(procs, cages[4].pid)


async def test_unknown_names_suggest_the_nearest(zoo: Zoo) -> None:
    """Of actors and of processes."""
    job = Job.here()
    with pytest.raises(UnknownName, match=r"there is no actor animal\[3\]; did you mean animals\[3\]\?"):
        await job.ps("animal[3]")
    with pytest.raises(UnknownName, match=r"did you mean animals\[0\]"):
        await job.state("animals[9]")
    with pytest.raises(UnknownName, match=r"did you mean cages"):
        await job.stack("cage[1]")


async def test_a_profile_shows_where_time_goes(zoo: Zoo) -> None:
    """Also of a process that is stuck; a frozen one is an error that says so."""
    await zoo.start(SPINNING)
    job = Job.here()
    profile = await job.profile("cages[2]", 0.5)
    assert ("py-spy" if find_py_spy() else "signals") == profile.tool
    assert profile.samples > 2
    assert re.search(r"spin \(\S*zoo.py:\d+\) \d+$", profile.folded, re.MULTILINE)
    assert profile.svg.rstrip().endswith("</svg>")
    await job.freeze("cages[1]")
    async with asyncio.timeout(10):
        while (await job.ps("animals[1]"))[0].state != "frozen":
            await asyncio.sleep(0.02)
    with pytest.raises(UsageError, match="thaw it"):
        await job.profile("cages[1]", 0.5)


async def test_a_bundle_has_everything_but_secrets(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no value of an environment variable, no attribute."""
    monkeypatch.setenv("SOME_TOKEN", "hunter2-secret")
    job = Job.here()
    await zoo.one(0).say.call_one("a line")
    path = await job.bundle(tmp_path / "report")
    assert path.name == "report.tar.gz"
    with tarfile.open(path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        texts = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}  # type: ignore[union-attr]
    wanted = {"about.json", "ps.json", "procs.json", "tree.json", "calls.json", "links.json", "events.json", "stacks.json", "doctor.json"}
    assert wanted <= names
    assert any("a line" in text for name, text in texts.items() if "/logs/" in name)
    whole = "".join(texts.values())
    assert "SOME_TOKEN" in whole
    assert "hunter2-secret" not in whole
    assert job.runtime.key.hex() not in whole
    assert "xxxxx" not in whole


async def test_what_a_bundle_can_not_have_is_noted_in_its_place(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one line; the rest is there."""

    async def fails(*args: Any, **kwargs: Any) -> Any:
        raise NoAnswer("the agent does not answer")
        yield

    job = Job.here()
    monkeypatch.setattr(job, "logs", fails)
    monkeypatch.setattr(job, "tree", lambda: anext(fails()))
    path = await job.bundle(tmp_path / "report.tgz")
    with tarfile.open(path) as tar:
        texts = {name.partition("/")[2]: tar.extractfile(name).read().decode() for name in tar.getnames()}  # type: ignore[union-attr]
    for name in ("logs.json", "tree.json"):
        assert {"error": "NoAnswer: the agent does not answer"} == json.loads(texts[name])
    assert 7 == len(json.loads(texts["ps.json"]))


async def test_records_are_json(zoo: Zoo) -> None:
    """Every record is plain values."""
    (row,) = to_json(await Job.here().ps("animals[0]"))
    assert ("animals[0]", 0, "ready") == (row["actor"], row["rank"], row["state"])
