"""Visiting a job: who is let in, what a visitor may do, and that it leaves nothing."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_async import attach_to_workers, shutdown, this_host
from monarch_async._runtime.asking import ask
from monarch_async._runtime.jobfile import RELEASE, jobs_folder
from monarch_async._runtime.jobfiles import read_job_file
from monarch_async.errors import ReadOnlyError, UsageError
from monarch_async.observe.errors import JobError
from monarch_async.observe.job import Job, attach
from monarch_async.observe.listing import jobs
from monarch_async.options import Options
from tests.api.waiting import until
from tests.hosts.workers import ROOT, make_key, worker
from tests.observe.zoo import SPINNING, Animal, Zoo


def the_file() -> Path:
    """The only job's."""
    (path,) = Path(jobs_folder()).glob("*.json")
    return path


def change(**fields: Any) -> None:
    """What stands in it."""
    path = the_file()
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def visitors(job: Job) -> int:
    """How many the client knows of."""
    return len(job.runtime.parts.get("visits", ()))


async def test_a_job_has_a_file_while_it_lasts(zoo: Zoo) -> None:
    """That only its user can read, and which says how to reach it."""
    assert 0o600 == stat.S_IMODE(the_file().stat().st_mode)
    assert 0o700 == stat.S_IMODE(os.stat(jobs_folder()).st_mode)
    (info,) = jobs()
    assert ("zoo", os.getpid(), "running", RELEASE) == (info.name, info.pid, info.state, info.version)
    file = read_job_file(info.file)
    assert bytes.fromhex(file.key) == Job.here().runtime.key


async def test_the_file_is_gone_when_the_job_is(state_home: Path) -> None:
    """Also that of a program that is killed, since its agent outlives it for a moment."""
    script = (
        "import asyncio\nfrom monarch_async import this_host\nasync def main():\n"
        "  await this_host()\n  print(1, flush=True)\n  await asyncio.sleep(99)\nasyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    await until(lambda: list(Path(jobs_folder()).glob("*.json")))
    path = the_file()
    process.kill()
    await process.wait()
    async with asyncio.timeout(10):
        while path.exists():
            await asyncio.sleep(0.02)


def test_the_release_is_that_of_the_package() -> None:
    """It is written down twice, since asking takes longer than starting."""
    assert f'version = "{RELEASE}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


async def test_a_visitor_sees_what_the_program_sees(zoo: Zoo) -> None:
    """Over its own links, also of a process that is stuck; and is forgotten when it leaves."""
    await zoo.start(SPINNING)
    own = Job.here()
    async with attach("zoo") as job:
        assert [row.state for row in await own.ps()] == [row.state for row in await job.ps()]
        assert "in spin" in (await job.stack("animals[2]"))[0].text
        assert 1 == visitors(own)
        assert job.id == own.id
    async with asyncio.timeout(10):
        while visitors(own):
            await asyncio.sleep(0.02)
    assert [] == [peer for peer in own.runtime.peers.values() if peer.address.name == "visitor"]


async def test_a_visitor_that_only_looks_changes_nothing(zoo: Zoo) -> None:
    """Whatever it asks for is refused by the job itself: by the client, the agent and the procs."""
    async with attach(str(os.getpid())) as job:
        for asked in (job.eval("animals[0]", "1"), job.kill("cages[0]"), job.freeze("cages[0]"), job.stop("animals")):
            with pytest.raises(ReadOnlyError, match="--write"):
                await asked
        animals = await job.reference("animals")
        with pytest.raises(ReadOnlyError, match="calls actors"):
            await animals.slice(gpus=0).pid.call_one()
        assert 3 == await zoo.one(0).eat.call_one(0)


class Evil:
    """Does something where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


async def test_nothing_of_a_visitor_that_only_looks_is_unpickled(zoo: Zoo, tmp_path: Path) -> None:
    """Its questions are plain values."""
    async with attach("zoo") as job:
        with pytest.raises(ReadOnlyError, match="read-only"):
            await ask(job.runtime, job.runtime.agent, "inspect", Evil(str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


async def test_what_a_visitor_changes_is_logged(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    """In the job's own log, with who did it; and is among its events."""
    async with attach("zoo", write=True) as job:
        (value,) = await job.eval("animals[0]", "self.meals")
        assert "3" == value.value
        animals = await job.reference("animals")
        assert 4 == await animals.slice(gpus=0).eat.call_one()
        assert 5 == await animals.slice(gpus=0).eat.call_one()

        def lines() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

        async with asyncio.timeout(10):
            while len(lines()) < 2:
                await asyncio.sleep(0.02)
        assert lines()[0].endswith(f"(pid {os.getpid()}): eval animals[0]: self.meals")
        assert lines()[1].endswith("calls animals[0].eat")
        assert 2 == len(lines())
        written = [event for event in await job.events() if event.kind == "write"]
        assert ["animals[0]", "animals[0]"] == [event.subject for event in written]


async def test_every_way_of_changing_something_is_logged(
    zoo: Zoo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of many members at once through the tree, once for each endpoint; a service that is asked, each time; looking, never."""
    monkeypatch.setattr("monarch_async.observe.visits.Options", functools.partial(Options, fan_out=2, fan_out_local=True))

    def lines() -> list[str]:
        return [record.getMessage().partition(": ")[2] for record in caplog.records if record.levelno == logging.WARNING]

    async with attach("zoo", write=True) as job:
        animals = await job.reference("animals")
        for _ in range(2):
            await animals.eat.call(0)
        await job.ps()
        (cage,) = [row for row in await job.procs() if row.process == "cages[6]"]
        await until(lambda: len(lines()) == 1)
        assert re.fullmatch(r"calls eat of 7 members of actor 0x[0-9a-f]+, in cages\[0–6\]", lines()[0])
        await ask(job.runtime, job.runtime.agent, "stop_procs", [cage.uid], 1.0)
        await until(lambda: len(lines()) == 2)
        assert "asks for stop_procs" == lines()[1]
        assert ["cages[0–6]", "agent[0]"] == [event.subject for event in await job.events() if event.kind == "write"]


async def test_who_is_not_let_in_is_told_why(zoo: Zoo) -> None:
    """Another key, another version, a file of another kind, a client that is gone: soon, and in words."""
    path = the_file()
    before = path.read_bytes()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"key": "00" * 32}, "can't be attached to: agent does not answer: no link to agent.*key"),
        ({"protocol": 99}, "speaks version 99 of the protocol"),
        ({"format": 7}, "no job"),
        ({"born": 1}, "has ended"),
    ]
    for fields, text in refused:
        path.write_bytes(before)
        change(**fields)
        start = time.monotonic()
        with pytest.raises(JobError, match=text):
            async with attach("zoo"):
                pass
        assert time.monotonic() - start < 5
    assert ["ended"] == [info.state for info in jobs()]
    assert [] == jobs()


async def test_a_file_that_leads_nowhere_is_a_plain_error(zoo: Zoo) -> None:
    """However wrong it is: in one line, soon."""
    path = the_file()
    before = path.read_bytes()
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"unix": "/nowhere/agent"}, None, "its agent's socket is gone"),
        ({"unix": "/dev/null"}, None, "can't be attached to: agent does not answer"),
        ({"unix": "/nowhere/agent", "tcp": "nonsense"}, {"key": "00" * 32, "tls": None}, "can't be attached to"),
        ({"unix": "/nowhere/agent", "tcp": "127.0.0.1:1"}, {"key": "00" * 32, "tls": None}, "can't be attached to: agent does not answer"),
        ({}, {"key": "00" * 32, "tls": {"cert": "/no", "key": "/no", "ca": "/no"}}, "/no"),
        ({}, {"key": "00" * 32}, "is no job file: network: lacks fields, or has others: tls"),
        ({"uid": "0a"}, None, "can't be attached to: agent does not answer"),
    ]
    for agent, network, text in wrong:
        path.write_bytes(before)
        change(agent={**json.loads(before)["agent"], **agent}, network=network)
        start = time.monotonic()
        with pytest.raises((JobError, UsageError), match=text) as raised:
            async with attach(str(path)):
                pass
        assert "\n" not in str(raised.value)
        assert time.monotonic() - start < 8


async def test_a_file_that_others_can_read_is_not_believed(zoo: Zoo) -> None:
    """Its key is worth nothing."""
    path = the_file()
    path.chmod(0o644)
    with pytest.raises(JobError, match="chmod 600"):
        async with attach(str(path)):
            pass
    with pytest.raises(JobError, match="no job"):
        async with attach():
            pass


async def test_a_visitor_that_is_killed_leaves_nothing(zoo: Zoo, tmp_path: Path) -> None:
    """Neither in the client nor in a proc, where it has a trace."""
    script = (
        "import asyncio\nfrom monarch_async.observe.job import attach\nasync def main():\n  async with attach('zoo') as job:\n"
        "    await job.ps(); print(1, flush=True)\n    async for row in job.trace('animals[0]'): pass\nasyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    own = Job.here()
    assert 1 == visitors(own)
    process.kill()
    await process.wait()
    async with asyncio.timeout(15):
        while visitors(own):
            await asyncio.sleep(0.02)
        look = "len(__import__('monarch_async.ambient', fromlist=['x']).current_runtime().parts.get('traces', ()))"
        while (await own.eval("animals[0]", look))[0].value != "0":
            await asyncio.sleep(0.2)
    assert [] == [link for link in await own.links() if link.peer == "visitor"]


async def test_a_job_whose_program_is_stuck(state_home: Path) -> None:
    """Its agent answers for it: what runs is listed as far as that knows it, soon, and the program is said not to answer."""
    script = (
        "import asyncio, sys, time\nsys.path.insert(0, sys.argv[1])\nfrom monarch_async import this_host, configure\n"
        "from tests.observe.zoo import Animal\nasync def main():\n  configure(stop_timeout=0.3, job_name='blocked')\n"
        "  await this_host().spawn_procs(name='cage').spawn('animal', Animal)\n"
        "  print(1, flush=True)\n  time.sleep(99)\nasyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    async with attach("blocked", patience=0.5) as job:
        start = time.monotonic()
        assert [("animal[0]", "ready", "cage[0]")] == [(row.actor, row.state, row.process) for row in await job.ps()]
        (client,) = [row for row in await job.procs() if row.kind == "client"]
        assert ("unreachable", process.pid) == (client.state, client.pid)
        assert "does not answer" in client.why
        assert "cage" in (await job.stack("animal[0]"))[0].process
        assert time.monotonic() - start < 5
    process.kill()
    await process.wait()
    path = Path(jobs_folder()) / f"{job.id}.json"
    async with asyncio.timeout(10):
        while path.exists():
            await asyncio.sleep(0.02)


async def test_two_jobs_are_told_apart(zoo: Zoo, state_home: Path) -> None:
    """By their ids; a name that fits both is an error that lists them."""
    path = the_file()
    other = path.with_name("0123456789ab.json")
    other.write_text(json.dumps({**json.loads(path.read_text()), "id": "0123456789ab"}))
    other.chmod(0o600)
    with pytest.raises(JobError, match="several jobs fit: zoo"):
        async with attach("zoo"):
            pass
    async with attach(path.stem) as job:
        assert path.stem == job.id
    other.unlink()


async def test_what_is_no_proc_is_not_restarted(zoo: Zoo) -> None:
    """The program and its agent are not for that."""
    with pytest.raises(UsageError, match="it is the client of this job"):
        await Job.here().kill("client")


async def test_a_job_of_several_hosts_is_visited_over_the_network(state_home: Path, tmp_path: Path) -> None:
    """With a copy of its file, from a host where its socket is not; its processes on all hosts are there, and refuse what they refuse."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        there = attach_to_workers([url], key=key).spawn_procs(name="there")
        here = this_host().spawn_procs(name="here")
        far, near = there.spawn("far", Animal), here.spawn("near", Animal)
        await asyncio.gather(far.pid.call_one(), near.pid.call_one())
        copy = tmp_path / "copy.json"
        copy.write_text(json.dumps({**json.loads(the_file().read_text()), "machine": "another"}))
        copy.chmod(0o600)
        async with attach(str(copy)) as job:
            assert job.runtime.me.host != Job.here().runtime.me.host
            assert ["far[0]", "near[0]"] == [row.actor for row in await job.ps()]
            assert {"ready"} == {row.state for row in await job.ps()}
            assert 2 == len([row for row in await job.procs() if row.kind == "agent"])
            with pytest.raises(ReadOnlyError):
                await job.eval("far[0]", "1")
            assert {"tcp"} == {link.kind for link in await job.links() if link.peer == "visitor"}
        await shutdown()
