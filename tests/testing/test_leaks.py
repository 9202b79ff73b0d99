"""The leak check finds each kind of leak, names it, and calls nothing a leak that goes away in time."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarch_async.testing.leaks import Kind, Leak, LeakCheck, LeakError

SLEEP = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]


def check(*kinds: Kind, timeout: float = 0.0) -> LeakCheck:
    return LeakCheck(kinds or ("task", "thread", "process", "fd", "segment"), timeout=timeout)


def only(leaks: list[Leak]) -> str:
    """The one leak there is, in words."""
    assert 1 == len(leaks), leaks
    return str(leaks[0])


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has started and ends when its input does."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def leave_open_and_raise(fds: list[int]) -> None:
    fds.append(os.memfd_create("inside"))
    raise KeyError("mine")


def test_nothing_new_is_nothing_left() -> None:
    """With nothing started there is nothing to report, however often one looks."""
    here = check()
    here.assert_none()
    assert [] == here.find()


async def test_a_pending_task_is_named_until_it_ends() -> None:
    """A task that waits is a leak with its name and coroutine; once cancelled it is none."""
    here = check("task")
    task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
    with pytest.raises(LeakError, match=r"task 'forgotten' of Event\.wait") as caught:
        await here.wait_none()
    assert (Leak("task", "'forgotten' of Event.wait"),) == caught.value.leaks
    task.cancel()
    await LeakCheck(["task"]).wait_none()
    assert [] == [leak for leak in here.find() if "forgotten" not in str(leak)]
    with pytest.raises(asyncio.CancelledError):
        await task
    await here.wait_none()


async def test_waiting_lets_the_loop_finish_tasks() -> None:
    """A task that ends when the loop runs on is waited for, and the awaiting task is no leak."""
    here = check("task", timeout=5.0)
    for _ in range(3):
        asyncio.get_running_loop().create_task(asyncio.sleep(0.01))
    assert 3 == len(here.find())
    await here.wait_none()


def test_a_task_of_another_threads_loop_is_found() -> None:
    """A loop that runs in some other thread hides no task."""
    here = check("task")
    ready, done = threading.Event(), threading.Event()

    async def main() -> None:
        ready.set()
        await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    found = here.find()
    done.set()
    thread.join()
    assert "main" in only(found)
    here.assert_none()


def test_a_thread_is_named_until_it_ends() -> None:
    """A running thread is a leak by its name; one that ends within the timeout is none."""
    here = check("thread", timeout=5.0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy", daemon=True)
    thread.start()
    assert "thread 'busy' (daemon)" == only(here.find())
    timer = threading.Timer(0.02, done.set)
    timer.start()
    here.assert_none()


def test_an_open_descriptor_is_named_by_its_target(tmp_path: Path) -> None:
    """A file left open is named with its path."""
    here = check()
    path = tmp_path / "left-open"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    assert f"fd {fd} → {path}" == only(here.find())
    os.close(fd)
    here.assert_none()


def test_a_socket_is_named_by_its_addresses() -> None:
    """A socket left open tells its family and where it is bound, which the inode alone does not."""
    here = check()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert re.fullmatch(rf"fd {server.fileno()} → socket:\[\d+\] AF_INET \('127.0.0.1', {port}\) to -", only(here.find()))
    here.assert_none()


def test_a_descriptor_that_takes_an_old_number_is_a_leak() -> None:
    """Equal counts don't hide a leak: what was there is told from what is there by its identity."""
    first = os.memfd_create("first")
    here = check()
    os.close(first)
    second = os.memfd_create("second")
    assert first == second
    assert f"fd {second} → /memfd:second (deleted)" == only(here.find())
    os.close(second)
    here.assert_none()


def test_a_mapping_outlives_its_descriptor() -> None:
    """Shared memory that is mapped is a leak even when its descriptor is closed."""
    here = check()
    fd = os.memfd_create("pool")
    os.truncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    os.close(fd)
    leaks = [str(leak) for leak in here.find() if leak.kind == "segment"]
    memory.close()
    assert 1 == len(leaks)
    assert "/memfd:pool" in leaks[0]
    here.assert_none()


def test_a_name_in_dev_shm_is_a_leak_once_nobody_uses_it() -> None:
    """A name left in /dev/shm is found; while some other process maps it, it is that process's."""
    here = check("segment")
    path = Path(f"/dev/shm/monarch-async-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    mapping = f"import mmap, sys; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); sys.stdin.read()"
    try:
        with running([sys.executable, "-S", "-c", mapping]):
            assert [] == here.find()
        assert f"segment {path}, a name that outlives its processes" == only(here.find())
    finally:
        path.unlink()
    here.assert_none()


def test_a_child_is_named_by_its_command_until_it_is_waited_for() -> None:
    """A child counts while it runs and, not waited for, after it ended."""
    here = check("process")
    with running(SLEEP) as process:
        assert f"process {process.pid}, child: {' '.join(SLEEP)}" == only(here.find())
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert "child, not waited for" in only(here.find())
    here.assert_none()


def test_a_process_whose_parent_is_gone_is_found() -> None:
    """A descendant counts although it is nobody's child any more."""
    here = check("process")
    out, into = os.pipe()
    orphan = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdin=0, stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", orphan], stdin=out, stdout=subprocess.PIPE, text=True, check=True).stdout)
    os.close(out)
    found = here.find()
    os.close(into)
    assert re.match(rf"process {pid}, descendant \(parent is \d+\): ", only(found))
    here.timeout = 10.0
    here.assert_none()


def test_a_process_of_somebody_else_is_no_leak() -> None:
    """A process that carries no mark of this one is not ours, whenever it started."""
    here = check("process")
    out, into = os.pipe()
    # Without the marking variable there is nothing to know it by.
    bare = f"import subprocess; subprocess.Popen({SLEEP!r}, stdin=0, stdout=subprocess.DEVNULL, env={{}})"
    subprocess.run([sys.executable, "-c", bare], stdin=out, check=True)
    os.close(out)
    try:
        assert [] == here.find()
    finally:
        os.close(into)


def test_what_is_ignored_is_no_leak(tmp_path: Path) -> None:
    """Patterns are searched in the kind and the words together."""
    strict = LeakCheck(timeout=0.0, ignore=[r"^thread .*left"])
    lenient = LeakCheck(timeout=0.0, ignore=[r"^fd .*left"])
    fd = os.open(tmp_path / "left", os.O_CREAT)
    assert "left" in only(strict.find())
    assert [] == lenient.find()
    os.close(fd)


def test_as_a_context_it_starts_at_its_beginning_and_leaves_errors_alone() -> None:
    """`with` compares with the moment of entry; an error inside passes unchanged, leak or not."""
    outside = os.memfd_create("outside")
    fds: list[int] = []
    with pytest.raises(LeakError, match="memfd:inside"), LeakCheck(timeout=0.0):
        fds.append(os.memfd_create("inside"))
    with pytest.raises(KeyError, match="mine"), LeakCheck(timeout=0.0):
        leave_open_and_raise(fds)
    for fd in [outside, *fds]:
        os.close(fd)


async def test_as_an_async_context_it_waits_in_the_loop() -> None:
    """`async with` lets a task end by itself, and reports one that doesn't."""
    async with LeakCheck(timeout=5.0):
        asyncio.get_running_loop().create_task(asyncio.sleep(0.01))
    forgotten: list[asyncio.Task[object]] = []
    with pytest.raises(LeakError, match="wait"):
        async with LeakCheck(timeout=0.0):
            forgotten.append(asyncio.create_task(asyncio.Event().wait()))
    forgotten[0].cancel()
    await asyncio.wait(forgotten)


def test_bad_settings_are_refused() -> None:
    """An unknown kind and a negative timeout raise at once and say what is allowed."""
    with pytest.raises(ValueError, match="unknown kind 'socket'; known are task, thread, process, fd, segment"):
        LeakCheck(["socket"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="timeout must be 0 or more"):
        LeakCheck(timeout=-1.0)
