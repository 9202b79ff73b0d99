"""Logs as JSON lines: the fields, and what becomes of the output of processes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_async import Actor, configure, endpoint, this_host
from monarch_async.ambient import current_runtime
from monarch_async.observe.job import Job
from monarch_async.observe.json_lines import FIELDS, JsonFormatter, json_logging

log = logging.getLogger("tests.talker")


class Talker(Actor):
    @endpoint
    async def say(self, text: str) -> int:
        log.warning("said %s", text, extra={"step": 3})
        try:
            raise KeyError("gone")
        except KeyError:
            log.exception("not found")
        return os.getpid()

    @endpoint
    def say_from_thread(self) -> None:
        log.error("from a thread")
        print("plain\nwords", flush=True)  # noqa: T201


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger and the options as they were."""
    handlers = logging.getLogger().handlers[:]
    yield
    configure(log_json=False)
    for handler in logging.getLogger().handlers[:]:
        if handler not in handlers:
            logging.getLogger().removeHandler(handler)


async def test_what_processes_log_and_print_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Each line that the program shows is a record with all fields; of a handler with actor, endpoint and rank; prints become messages."""
    json_logging()
    procs = this_host().spawn_procs({"gpus": 2}, name="gpus")
    talkers: Any = procs.spawn("talkers", Talker)
    pid = await talkers.slice(gpus=1).say.call_one("hello")
    await talkers.slice(gpus=0).say_from_thread.call_one()
    log.warning("in the program")
    job = current_runtime().client.host
    logged = [line.text async for line in Job.here().logs("gpus[1]")]
    await procs.stop()
    out, err = capfd.readouterr()
    lines = [json.loads(line) for line in (out + err).splitlines()]
    assert all(list(line) == list(FIELDS) for line in lines)
    by_message = {line["message"]: line for line in lines}
    said = by_message["said hello"]
    known = {"level": "WARNING", "logger": "tests.talker", "actor": "talkers[1]", "endpoint": "say", "rank": 1, "process": "gpus[1]"}
    assert {**known, "host": os.uname().nodename, "pid": pid, "job": job, "exception": None, "extra": {"step": 3}} == {
        name: value for name, value in said.items() if name not in ("time", "message")
    }
    assert said["time"].endswith("Z")
    assert "KeyError: 'gone'" in by_message["not found"]["exception"]
    assert ("talkers[0]", "say_from_thread", 0) == tuple(by_message["from a thread"][name] for name in ("actor", "endpoint", "rank"))
    for text in ("plain", "words"):
        printed = by_message[text]
        assert ("stdout", "INFO", "gpus[0]", 0, job) == tuple(printed[name] for name in ("logger", "level", "process", "rank", "job"))
        assert text in out
    assert ("client", None, None) == tuple(by_message["in the program"][name] for name in ("process", "actor", "rank"))
    assert said == json.loads(logged[0])
    assert ["plain", "words"] == sorted(message for message in by_message if by_message[message]["logger"] in ("stdout", "stderr"))


def test_odd_records_are_lines_too() -> None:
    """What JSON has no form for is its repr; line breaks stay inside; a record of another runtime's absence has no job."""
    record = log.makeRecord("a", logging.INFO, "f.py", 1, "two\nlines %s", (b"\xff",), None, extra={"thing": object, "n": 1})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert "two\nlines b'\\xff'" == fields["message"]
    assert {"thing": repr(object), "n": 1} == fields["extra"]
    assert (None, None, None) == (fields["job"], fields["process"], fields["actor"])
    assert os.getpid() == fields["pid"]


@pytest.mark.parametrize("odd", [{(0, 1): 2}, float("nan")], ids=["keys", "numbers"])
def test_what_json_refuses_is_its_repr(odd: object) -> None:
    """Keys that are no text, and numbers that JSON does not know."""
    line = JsonFormatter().format(log.makeRecord("a", logging.INFO, "f.py", 1, "step", (), None, extra={"odd": odd}))
    assert {"odd": repr(odd)} == json.loads(line)["extra"]


async def test_the_environment_switches_it_on(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a change to the program."""
    monkeypatch.setenv("MONARCH_ASYNC_LOG_JSON", "1")
    procs = this_host().spawn_procs(name="gpus")
    talker: Any = procs.spawn("talker", Talker)
    await talker.say.call_one("hello")
    await procs.stop()
    out, err = capfd.readouterr()
    assert "said hello" in {json.loads(line)["message"] for line in (out + err).splitlines()}
