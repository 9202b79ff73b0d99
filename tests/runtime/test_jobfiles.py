"""Job files: written so that nobody else can have a hand in it, and believed only where they are what they should be."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_async._runtime import jobfiles
from monarch_async._runtime.announcing import Announcer
from monarch_async._runtime.jobfile import JobFile, jobs_folder, state_folder
from monarch_async._runtime.jobfiles import LARGEST, job_files, read_job_file, write_job_file

ADDRESS: dict[str, Any] = {"uid": "0a", "host": "0b", "unix": "/tmp/x", "tcp": "", "name": "agent", "rank": 0}
KEY = "ab" * 32
FILE = JobFile("0a", "train", 7, 1, "boot/1", 1.5, "0.1.0", 1, ADDRESS, ADDRESS, KEY)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Path(jobs_folder())


def test_what_is_written_is_read(folder: Path) -> None:
    """With the modes that keep it private; a second time in its place, whatever an earlier process has left."""
    network = {"key": KEY, "tls": {"cert": "c", "key": "k", "ca": "a"}}
    file = FILE._replace(network=network, agents=(ADDRESS,))
    (path,) = [write_job_file(file).path]
    assert (0o600, 0o700) == tuple(stat.S_IMODE(os.stat(place).st_mode) for place in (path, folder))
    assert file._replace(path=path) == read_job_file(path)
    (folder / f".0a.{os.getpid()}").write_text("left")
    write_job_file(file._replace(name="other"))
    assert ["other"] == [found.name for found in job_files()]
    assert ["0a.json"] == os.listdir(folder)


def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path) -> None:
    """Neither in place of the file nor of what becomes it."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder.mkdir(0o700, parents=True)
    (folder / "0a.json").symlink_to(precious)
    (folder / f".0a.{os.getpid()}").symlink_to(precious)
    write_job_file(FILE)
    assert "mine" == precious.read_text()
    assert not (folder / "0a.json").is_symlink()


def test_a_folder_that_others_can_change(folder: Path) -> None:
    """Is neither written to nor believed."""
    path = write_job_file(FILE).path
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="chmod 700 it"):
        write_job_file(FILE)
    with pytest.raises(PermissionError, match="chmod 700 it"):
        job_files()
    assert Path(path).exists()


def changed(**fields: Any) -> str:
    return json.dumps({"format": 1, **FILE._asdict(), "network": None, "agents": [], **fields}).replace(', "path": ""', "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "another version"),
        ("[" * 100_000, "no job file"),
        ("\xff\xfe", "no job file"),
        (changed()[:100], "no job file"),
        (changed(format=2), "another version"),
        (changed(more=1), "more"),
        (changed(id="../../x"), "id is '../../x'"),
        (changed(id=7), "id is 7"),
        (changed(pid="7"), "pid is '7'"),
        (changed(pid=-1), "pid is -1"),
        (changed(pid=True), "pid is True"),
        (changed(pid=10**30), "pid is 1000"),
        (changed(started="now"), "started is 'now'"),
        (changed(started=float("nan")), "started is nan"),
        (changed(name=None), "name is None"),
        (changed(name="x" * 5000), "name is 'xxx"),
        (changed(key="secret"), "key is 'secret'"),
        (changed(agent={}), "address: lacks fields, or has others: host"),
        (changed(agent={**ADDRESS, "unix": ["a"]}), "address: unix is"),
        (changed(agents=[3]), "address: lacks fields"),
        (changed(agents=None), "agents is None"),
        (changed(network={"key": KEY}), "network: lacks fields, or has others: tls"),
        (changed(network={"key": KEY, "tls": {"cert": 1, "key": "", "ca": ""}}), "tls: cert is 1"),
        (changed() + " " * LARGEST, "it has more than"),
    ],
)
def test_what_is_broken_or_hostile_is_a_plain_error(text: str, says: str, folder: Path) -> None:
    """One line that says which field is wrong; and it is not among the jobs."""
    folder.mkdir(0o700, parents=True)
    path = folder / "0a.json"
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"0a.json is no job file: ") as raised:
        read_job_file(str(path))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [] == job_files()


def test_what_is_no_file(folder: Path) -> None:
    """Nothing waits for a pipe or follows a link; a file of another job's name is not believed."""
    path = write_job_file(FILE).path
    (folder / "link.json").symlink_to(path)
    os.mkfifo(folder / "pipe.json", 0o600)
    os.link(path, folder / "0c.json")
    with pytest.raises(OSError, match="symbolic"):
        read_job_file(str(folder / "link.json"))
    with pytest.raises(ValueError, match="is no file"):
        read_job_file(str(folder / "pipe.json"))
    assert ["0a.json"] == [Path(file.path).name for file in job_files()]


@pytest.mark.parametrize("state", ["", "relative"])
def test_one_place_for_what_lasts(state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path that is none is not used, here as by the prompt."""
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/.local/state/monarch_async" == state_folder()


async def test_a_file_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In another thread; of several the last one stands; what can't be written is noted, and nothing else."""
    threads = []
    replace = os.replace

    def note(*args: Any) -> None:
        threads.append(threading.get_ident())
        replace(*args)

    monkeypatch.setattr("os.replace", note)
    announcer = Announcer(asyncio.get_running_loop(), logging.getLogger("test"))
    for name in ("a", "b", "c"):
        announcer.announce(FILE._replace(name=name))
    while announcer._writing is not None:
        await asyncio.shield(announcer._writing)
    assert ["c"] == [file.name for file in job_files()]
    assert 2 == len(threads)
    assert threading.get_ident() not in threads
    await announcer.close()


async def test_a_file_that_can_not_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Is noted in the log, and nothing else comes of it."""
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    caplog.set_level(logging.INFO)
    announcer = Announcer(asyncio.get_running_loop(), logging.getLogger("test"))
    announcer.announce(FILE)
    await announcer.close()
    assert "nobody can look into this job" in caplog.text


@pytest.mark.parametrize(("where", "what"), [(jobfiles, "write_job_file"), (threading.Thread, "start")], ids=["writing", "thread"])
async def test_a_thread_that_fails(monkeypatch: pytest.MonkeyPatch, where: Any, what: str) -> None:
    """Or that can't be started: who closes does not wait for it for ever."""

    def fail(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    monkeypatch.setattr(where, what, fail)
    announcer = Announcer(asyncio.get_running_loop(), logging.getLogger("test"))
    async with asyncio.timeout(2):
        announcer.announce(FILE)
        await announcer.close()
    for thread in threading.enumerate():
        if thread.name == "job file":  # it tells before it ends
            thread.join()
