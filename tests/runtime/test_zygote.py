"""How processes end: whatever is killed, with whatever signal, nothing is left and everybody is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from monarch_async._runtime import linux
from monarch_async._runtime.child import Exit, is_gone
from monarch_async._runtime.launcher import Launcher
from monarch_async.errors import SpawnError
from tests.runtime.agents import ROOT, in_agent, receive, spec, wait_gone, zygote_pids


@in_agent
async def test_family_ends_with_the_proc(launcher: Launcher, tmp_path: Path) -> None:
    """When a process ends by itself, its group and all descendants that left the group are gone too."""
    child = await launcher.spawn(spec("family"))
    pids = json.loads(await receive(child))
    assert 0 == (await child.exited).code
    await wait_gone(pids)


@in_agent
async def test_kill_while_frozen(launcher: Launcher, tmp_path: Path) -> None:
    """`kill()` ends a stopped process and its family; `signal()` reaches the process alone."""
    child = await launcher.spawn(spec("family", b"wait"))
    pids = json.loads(await receive(child))
    child.signal(signal.SIGSTOP)
    child.kill()
    assert (None, 9) == ((how := await child.exited).code, how.signal)
    await wait_gone(pids)
    child.signal(signal.SIGTERM)
    child.kill()


@in_agent
async def test_daemon_lives_as_long_as_its_proc(launcher: Launcher, tmp_path: Path) -> None:
    """An orphan that a living process made on purpose stays, also while other processes come and go, and goes with its process."""
    child = await launcher.spawn(spec("daemon"))
    pid = int(await receive(child))
    assert 0 == (await (await launcher.spawn(spec("nothing"))).exited).code
    assert psutil.STATUS_ZOMBIE != psutil.Process(pid).status()
    assert child.pid == psutil.Process(pid).ppid()
    child.control.send(b"done")
    assert 0 == (await child.exited).code
    await wait_gone([pid])


@in_agent
async def test_proc_zygote_killed(launcher: Launcher, tmp_path: Path) -> None:
    """SIGKILL to a proc zygote: its processes and their families are gone, their end is told as unknown, and the next spawn works."""
    child = await launcher.spawn(spec("family", b"wait"))
    pids = json.loads(await receive(child))
    _, (zygote,) = zygote_pids()
    os.kill(zygote, signal.SIGKILL)
    how = await child.exited
    assert Exit() == how
    assert "not known" in how.describe()
    await wait_gone([child.pid, *pids])
    assert 0 == (await (await launcher.spawn(spec("nothing"))).exited).code


@in_agent
async def test_root_zygote_killed(launcher: Launcher, tmp_path: Path) -> None:
    """SIGKILL to the root zygote: everything below it is gone, every `exited` resolves, and spawning says why it can't."""
    children = [await launcher.spawn(spec("family", b"wait")), await launcher.spawn(spec("idle_loop", preload=("json",)))]
    pids = json.loads(await receive(children[0]))
    await receive(children[1])
    root, zygotes = zygote_pids()
    os.kill(root, signal.SIGKILL)
    assert 9 == (await launcher.lost).signal
    await asyncio.wait([child.exited for child in children])
    await wait_gone([root, *zygotes, *pids, *[child.pid for child in children]])
    with pytest.raises(SpawnError, match="SIGKILL"):
        await launcher.spawn(spec("nothing"))


@in_agent
async def test_stop_all(launcher: Launcher, tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL for who does not obey in time; nothing can be spawned any more."""
    children = [await launcher.spawn(spec("wait")), await launcher.spawn(spec("ignore_sigterm"))]
    for child in children:
        await receive(child)
    await launcher.stop_all(0.3)
    assert [signal.SIGTERM, signal.SIGKILL] == [child.exited.result().signal for child in children]
    with pytest.raises(SpawnError, match="stopping"):
        await launcher.spawn(spec("nothing"))


def memory_cgroup() -> tuple[Path, str] | None:
    """The memory cgroup of this process and the name of its limit, where we may make one below it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder, limit = Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
        else:
            folder, limit = Path(f"/sys/fs/cgroup{path}"), "memory.max"
        if (folder / limit).exists() and os.access(folder, os.W_OK):
            return folder, limit
    return None


@pytest.mark.skipif(memory_cgroup() is None, reason="needs a memory cgroup that it may divide")
@in_agent
async def test_out_of_memory(launcher: Launcher, tmp_path: Path) -> None:
    """A process that the kernel killed for want of memory is told from one that somebody killed in the same cgroup."""
    await (await launcher.spawn(spec("nothing"))).exited
    _, (zygote,) = zygote_pids()
    found = memory_cgroup()
    assert found is not None
    parent, limit = found
    group = parent / f"monarch-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(48 << 20))
        (group / "cgroup.procs").write_text(str(zygote))
        for code, oom in [
            (b"os.kill(os.getpid(), 9)", False),
            (b"bytearray(os.urandom(1 << 28))", True),
            (b"os.kill(os.getpid(), 9)", False),
        ]:
            how = await (await launcher.spawn(spec("run_code", code))).exited
            assert (9, oom) == (how.signal, how.oom)
        launcher.close()
    finally:
        group.rmdir()


AGENT = """
import asyncio, json
from monarch_async._runtime.launcher import Launcher
from tests.runtime.agents import receive, spec
async def main(launcher):
    launcher.attach(asyncio.get_running_loop())
    children = await asyncio.gather(*[launcher.spawn(spec("family", b"wait")) for _ in range(2)])
    pids = [child.pid for child in children] + [pid for child in children for pid in json.loads(await receive(child))]
    print(json.dumps(pids), flush=True)
    await asyncio.Event().wait()
asyncio.run(main(Launcher.start()))
"""


def test_agent_killed() -> None:
    """SIGKILL to the agent: zygotes, processes, their children and who left the groups are all gone within 2 s."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT], cwd=ROOT, stdout=subprocess.PIPE)
    with agent:
        assert agent.stdout is not None
        told = json.loads(agent.stdout.readline())
        pids = {child.pid for child in psutil.Process(agent.pid).children(recursive=True)}
        assert pids >= set(told)
        pidfds = [os.pidfd_open(pid) for pid in pids]
        agent.kill()
        deadline = time.monotonic() + 2
        left = [fd for fd in pidfds if not is_gone(fd, max(0.0, deadline - time.monotonic()))]
        for fd in pidfds:
            os.close(fd)
    assert [] == left


def test_exit_describes_itself() -> None:
    """The words for an end name the signal, and memory only where the kernel did."""
    assert "exited with code 3" == Exit(code=3).describe()
    assert "killed by signal 9 (SIGKILL)" == Exit(signal=9).describe()
    assert "killed by signal 9 (SIGKILL), out of memory" == Exit(signal=9, oom=True).describe()
    assert f"killed by signal {signal.SIGRTMIN + 3}" == Exit(signal=signal.SIGRTMIN + 3).describe()


def test_oom_count_of_both_cgroup_versions(tmp_path: Path) -> None:
    """The count of out-of-memory kills is read from either kind of cgroup, and is unknown where there is none."""
    membership = tmp_path / "membership"
    for line, file, text in [
        ("0::/job", "job/memory.events", "low 0\noom 2\noom_kill 5\n"),
        ("4:memory:/old", "memory/old/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
    ]:
        membership.write_text(f"9:name=systemd:/\n{line}\n")
        assert linux.oom_kills(str(tmp_path), str(membership)) is None
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
        assert 5 == linux.oom_kills(str(tmp_path), str(membership))
    assert linux.oom_kills(str(tmp_path), str(tmp_path / "missing")) is None
