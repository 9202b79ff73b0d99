"""Output as it is read: whole lines, whatever is printed and however late its agent is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import pytest

from monarch_async import Actor, UsageError, endpoint, shutdown, this_host
from monarch_async.observe import logs
from monarch_async.observe.errors import UnknownName
from monarch_async.observe.job import Job, attach
from monarch_async.observe.survey import Survey
from tests.observe.zoo import CRASHED, Zoo

LINE = "äöü€" * 10


class Printer(Actor):
    """Prints a lot."""

    @endpoint
    async def print_much(self, count: int) -> None:
        for _ in range(count):
            print(LINE)  # noqa: T201
        sys.stdout.flush()

    @endpoint
    async def print_in_pieces(self) -> None:
        for byte in f"{LINE}\nno end".encode():
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.buffer.flush()
            await asyncio.sleep(0)

    @endpoint
    async def crash(self) -> None:
        print("the last words", flush=True)  # noqa: T201
        os._exit(3)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked from now on."""
    asked: list[str] = []
    ask = Survey.inspect

    async def inspect(survey: Any, address: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return await ask(survey, address, name, *args, **kwargs)

    monkeypatch.setattr(Survey, "inspect", inspect)
    return asked


async def test_no_character_is_cut(zoo: Zoo) -> None:
    """Where output comes in many pieces, by what a process writes at once and by what an answer holds."""
    printer = await zoo.cages.slice(gpus=0).spawn("printer", Printer)
    count = 20_000
    following = Job.here().logs("cages[0]", follow=True)
    done = asyncio.ensure_future(printer.print_much.call_one(count))
    assert {LINE} == {(await anext(following)).text for _ in range(count)}
    await done
    await printer.print_in_pieces.call_one()
    assert LINE == (await anext(following)).text
    await following.aclose()
    last = [line.text async for line in Job.here().logs("cages[0]")][-2:]
    assert [LINE, "no end"] == last


async def test_nothing_is_asked_while_nothing_is_printed(zoo: Zoo, questions: list[str]) -> None:
    """The agent answers when there is something."""
    following = Job.here().logs("cages", follow=True)
    line = asyncio.ensure_future(anext(following))
    await asyncio.sleep(1.0)
    asked = len(questions)
    await asyncio.sleep(1.0)
    assert asked == len(questions)
    await zoo.one(2).say.call_one("now")
    assert ("cages[2]", "now") == ((await line).process, (await line).text)
    await following.aclose()


async def test_an_agent_that_is_late(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is asked again: what was printed meanwhile comes."""
    monkeypatch.setattr(logs, "WAIT", 0.2)
    monkeypatch.setattr(logs, "LATE", 0.1)
    job = Job.here()
    job._survey.patience = 0.2
    (agent,) = [row.pid for row in await job.procs() if row.kind == "agent"]
    following = job.logs("cages", follow=True)
    await zoo.one(2).say.call_one("before")
    assert "before" == (await anext(following)).text
    line = asyncio.ensure_future(anext(following))
    os.kill(agent, signal.SIGSTOP)
    await asyncio.sleep(1.5)
    await zoo.one(2).say.call_one("meanwhile")
    assert not line.done()
    os.kill(agent, signal.SIGCONT)
    assert "meanwhile" == (await line).text
    await following.aclose()


async def test_the_end_of_a_job_is_the_end(zoo: Zoo) -> None:
    """For who follows: then no more can come, and nothing of it runs on."""
    async with attach("zoo") as job:
        following = job.logs(follow=True)
        await zoo.one(2).say.call_one("the last")
        assert "the last" == (await anext(following)).text
        rest = asyncio.ensure_future(_rest(following))
        await shutdown()
        assert [] == await rest


async def _rest(lines: Any) -> list[str]:
    return [line.text async for line in lines]


async def test_a_process_that_was_started_again_is_followed(zoo: Zoo) -> None:
    """It has the same name."""
    following = Job.here().logs(f"cages[{CRASHED}]", follow=True)
    await zoo.one(CRASHED).say.call_one("one")
    assert "one" == (await anext(following)).text
    await zoo.start(CRASHED)
    await zoo.one(CRASHED).say.call_one("two")
    assert "the last words" == (await anext(following)).text
    assert "two" == (await anext(following)).text
    await following.aclose()


async def test_a_process_that_is_gone_has_left_its_output(failures: list[Any]) -> None:
    """Which is found by its name; a name that nobody has or had is unknown, and what is kept nowhere is said to be so."""
    procs = this_host().spawn_procs(name="cage")
    printer = await procs.spawn("printer", Printer)
    printer.crash.broadcast()
    async with asyncio.timeout(10):
        while not failures:
            await asyncio.sleep(0.02)
    assert ["the last words"] == [line.text async for line in Job.here().logs("cage[0]")]
    with pytest.raises(UnknownName):
        await anext(Job.here().logs("nobody"))
    with pytest.raises(UsageError, match="only that of processes is kept"):
        await anext(Job.here().logs("client"))
    with pytest.raises(UsageError, match="no regular expression"):
        await anext(Job.here().logs(grep="("))
