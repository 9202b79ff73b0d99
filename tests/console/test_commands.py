"""The commands that look into a job, as a second process runs them: tables, JSON of frozen schemas, and how they fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from monarch_async.console.arguments import READS, WRITES
from monarch_async.observe import records
from tests.console.schema import schema_of, wrong
from tests.hosts.workers import ENVIRONMENT, ROOT, command
from tests.observe.zoo import BUSY, CRASHED, FROZEN, LOCKED, SLEEPING, SPINNING, Zoo

SCHEMAS = Path(__file__).with_name("schemas")
OF_COMMANDS: dict[str, Any] = {
    "jobs": list[records.JobInfo],
    "doctor": list[records.Check],
    "ps": list[records.ActorRow],
    "procs": list[records.ProcRow],
    "tree": list[records.TreeRow],
    "top": list[records.TopRow],
    "calls": list[records.CallRow],
    "where": list[records.Hop],
    "stack": list[records.StackRow],
    "links": list[records.LinkRow],
    "deadletters": list[records.DeadLetterRow],
    "why": list[records.Cause],
    "events": list[records.Event],
    "logs": records.LogLine,
    "state": list[records.StateRow],
    "trace": records.Traced,
    "profile": records.Profile,
    "timeline": records.Recorded,
    "stop": list[records.Done],
    "kill": list[records.Done],
    "restart": list[records.Done],
    "freeze": list[records.Done],
    "thaw": list[records.Done],
    "eval": list[records.Evaluated],
}
"""What each command prints as JSON; one that is no list, a line for each."""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


async def run(*words: str) -> Ran:
    """In a process of its own, while this one goes on."""
    process = await asyncio.create_subprocess_exec(
        *command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, **os.environ}, cwd=ROOT
    )
    out, err = await process.communicate()
    return Ran(process.returncode or 0, out.decode(), err.decode())


def schema(name: str) -> dict[str, Any]:
    kind = OF_COMMANDS[name]
    if hasattr(kind, "_fields"):
        return schema_of(kind)
    return {"type": "array", "items": schema_of(kind.__args__[0])}


@pytest.mark.parametrize("name", OF_COMMANDS)
def test_the_schemas_are_frozen(name: str) -> None:
    """Each field that a command prints as JSON is in its file: others rely on the names, so a change is made in both, on purpose."""
    assert json.loads((SCHEMAS / f"{name}.json").read_text()) == schema(name)


def test_every_command_has_a_schema() -> None:
    """But for `bundle`, which writes a file."""
    assert {*READS, *WRITES, "jobs", "doctor"} - {"bundle"} == set(OF_COMMANDS)


async def test_each_command_prints_json_of_its_schema(zoo: Zoo, tmp_path: Path) -> None:
    """On a job in which something is wrong in every way; and none of them fails, or changes anything."""
    await zoo.start()
    await zoo.one(0).say.call_one("a line")
    feeding = asyncio.ensure_future(_feed(zoo))
    report = tmp_path / "report.tar.gz"
    arguments = {
        "top": ["--interval", "0.2"],
        "bundle": [str(report)],
        "where": ["animals[1]"],
        "stack": ["animals"],
        "why": ["animals[6]"],
        "state": ["animals[0]"],
        "trace": ["animals[0]", "--max", "2"],
        "profile": ["cages[2]", "--seconds", "0.2"],
        "timeline": [str(tmp_path / "out.json"), "--seconds", "0.2"],
        "eval": ["animals[0]", "self.meals"],
        "stop": ["animals[0]"],
        "kill": ["cages[1]"],
        "restart": ["cages[2]"],
        "freeze": ["cages[0]"],
        "thaw": ["cages[0]"],
    }
    for name in ("jobs", "doctor", *READS, "eval", "freeze", "thaw", "restart", "kill", "stop"):
        write = ["--write"] if name in WRITES else []
        ran = await run(name, *arguments.get(name, ()), *write, "--json")
        assert (0, "") == (ran.status, ran.err), name
        if name == "bundle":
            assert {"file": str(report)} == json.loads(ran.out)
            assert report.stat().st_size > 1000
            continue
        values = [json.loads(line) for line in ran.out.splitlines()] if name in ("logs", "trace", "top") else [json.loads(ran.out)]
        assert [] == [text for value in values for text in wrong(value, schema(name), name)]
        assert values, name
        assert all(values) or name == "deadletters", name
    feeding.cancel()


async def _feed(zoo: Zoo) -> None:
    while True:
        await zoo.one(0).eat.options(timeout=5).call_one(0)
        await asyncio.sleep(0.05)


async def test_tables_tell_the_states(zoo: Zoo) -> None:
    """As people read them."""
    await zoo.start(BUSY, SPINNING, SLEEPING, FROZEN, LOCKED, CRASHED)
    table = await run("ps")
    assert 0 == table.status
    words = [line.split() for line in table.out.splitlines()]
    assert ["ACTOR", "CLASS", "STATE", "SINCE", "ENDPOINT"] == words[0][:5]
    assert ["ready", "busy", "stuck", "stuck", "frozen", "stuck", "ready"] == [row[2] for row in words[1:]]
    stack = await run("stack", "animals[2]")
    assert "cages[2]" in stack.out
    assert "stuck in animals[2].spin: Python code blocks its event loop" in stack.out
    assert ", in spin" in stack.out
    where = await run("where", "animals[1]")
    assert where.out.startswith("animals[1].wait  running for ")
    assert "in wait\n    waits for sleep" in where.out
    why = await run("why", "animals[6]")
    assert ["animals[6]: its process cages[6] exited with code 3", "    the last words"] == why.out.splitlines()[:2]


FAILURES: list[tuple[list[str], int, str]] = [
    (["ps", "animal[3]"], 2, "there is no actor animal[3]; did you mean animals[3]?"),
    (["kill", "cages[0]"], 1, "this visit is read-only"),
    (["ps", "--job", "nothing"], 1, "no job 'nothing' runs; there are zoo"),
    (["ps", "--job", "/nowhere/job.json"], 1, "there is no job file"),
    (["restart", "animals[0]", "--write"], 2, "has no restart policy"),
    (["calls", "--older", "soon"], 2, "invalid number of seconds value: 'soon'"),
    (["stack"], 2, "required: PROCESS"),
    (["bundle", "/nowhere/x.tar.gz"], 1, "No such file or directory"),
]
"""What is asked for in vain, the status for that, and what is said."""


async def test_what_fails_says_so(zoo: Zoo) -> None:
    """With the status for that, one line, and no traceback; the job is as it was."""
    pids = await zoo.animals.pid.call()
    for words, status, text in FAILURES:
        ran = await run(*words)
        assert (status, "", True) == (ran.status, ran.out, text in ran.err), ran.err
        assert "Traceback" not in ran.err
    assert list(pids.values()) == list((await zoo.animals.pid.call()).values())


async def test_without_a_job(state_home: Path) -> None:
    """Plainly."""
    ran = await run("ps")
    assert (1, True) == (ran.status, "no job runs here" in ran.err)
    assert "no job runs\n" == (await run("jobs")).out


def test_help_lists_every_command_and_loads_nothing() -> None:
    """Neither torch nor the runtime nor asyncio."""
    script = (
        "import sys\nfrom monarch_async.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'asyncio', 'msgpack', 'monarch_async._runtime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "[]" == done.stdout.splitlines()[-1]
    assert {*READS, *WRITES, "jobs", "doctor", "worker"} <= {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
