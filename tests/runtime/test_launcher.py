"""`Launcher` with real processes: what a process is given, and what fails to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from monarch_async._runtime.child import Exit, ProcSpec
from monarch_async._runtime.launcher import Launcher
from monarch_async.errors import SpawnError, UsageError
from tests.runtime.agents import ROOT, end_of, in_agent, receive, spec, zygote_pids


@in_agent
async def test_how_it_ended(launcher: Launcher, tmp_path: Path) -> None:
    """Return, exit code, text as exit code, exception and signal are told apart, with what was printed."""
    for code, expected, on_stderr in [
        ("print('fine')", (0, None), ""),
        ("sys.exit(3)", (3, None), ""),
        ("sys.exit('bad thing')", (1, None), "bad thing\n"),
        ("os._exit(7)", (7, None), ""),
        ("os.kill(os.getpid(), 9)", (None, 9), ""),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", (None, signal.SIGRTMIN + 3), ""),
    ]:
        child = await launcher.spawn(spec("run_code", code.encode()))
        how, out, err = await end_of(child)
        assert expected == (how.code, how.signal), code
        assert ("fine\n" if "fine" in code else "", on_stderr) == (out, err)
        assert how.max_rss > 1 << 20
        assert not how.oom
        child.close()


@in_agent
async def test_exception_prints_its_traceback(launcher: Launcher, tmp_path: Path) -> None:
    """An exception that escapes the entry exits 1, and its traceback begins at the entry, not in the runtime."""
    how, _, err = await end_of(await launcher.spawn(spec("run_code", b"raise ValueError('no \xc3\xa9t\xc3\xa9')")))
    assert 1 == how.code
    assert "ValueError: no été" in err
    assert "entries.py" in err.splitlines()[1]


@in_agent
async def test_exit_handlers(launcher: Launcher, tmp_path: Path) -> None:
    """Handlers registered in the process run, after its threads ended; those of preloaded modules don't."""
    (tmp_path / "registers.py").write_text("import atexit\natexit.register(print, 'not mine')\n")
    code = b"""
import ctypes, time
atexit.register(print, 'mine')
threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()
ctypes.CDLL(None).puts(b'from C')
sys.exit(5)
"""
    how, out, _ = await end_of(await launcher.spawn(spec("run_code", code, preload=("registers",), sys_path=(ROOT, str(tmp_path)))))
    assert (5, ["thread", "mine"]) == (how.code, [line for line in out.splitlines() if line != "from C"])
    assert "from C\n" in out  # when depends on whether C buffers its output here


@in_agent
async def test_environment(launcher: Launcher, tmp_path: Path) -> None:
    """Variables, directory, name, CPUs, signals and descriptors are as asked for when the entry begins, and nothing more is open."""
    os.environ["REMOVED"] = "from the agent"  # only in the agent: its zygote was forked before
    cpu = min(os.sched_getaffinity(0))
    facts = {
        "os.environ['SET']": "1",
        "'HOME' in os.environ": False,
        "os.getcwd()": str(tmp_path),
        "sys.argv": ["worker"],
        "open('/proc/self/comm').read()": "worker\n",
        "list(os.sched_getaffinity(0))": [cpu],
        "os.environ['OMP_NUM_THREADS']": "1",
        "sys.stdin.read()": "",
        "(sys.stdout.line_buffering, sys.stdout.encoding, sys.stdout.errors)": [True, "utf-8", "backslashreplace"],
        "sorted(linux.open_descriptors())": [0, 1, 2, 3],
        "[os.get_inheritable(fd) for fd in range(4)]": [True, True, True, False],
        "os.getpgid(0) == os.getpid()": True,
        "[int(signal.getsignal(n)) for n in (15, 17)]": [0, 0],
        "signal.getsignal(2) is signal.default_int_handler": True,
        "len(signal.pthread_sigmask(0, ()))": 0,
        "__import__('gc').isenabled()": True,
        "control.fileno()": 3,
    }
    environment = {"SET": "1", "HOME": None}
    asked = spec("tell", json.dumps(list(facts)).encode(), name="worker", env=environment, cwd=str(tmp_path), cpus=frozenset({cpu}))
    child = await launcher.spawn(asked)
    assert list(facts.values()) == json.loads(await receive(child)), (await end_of(child))[2]


@in_agent
async def test_random_state_differs(launcher: Launcher, tmp_path: Path) -> None:
    """Two forks of one zygote don't draw the same numbers, from `random` or from numpy."""
    expressions = json.dumps(["random.random()", "float(sys.modules['numpy'].random.random())"]).encode()
    children = [await launcher.spawn(spec("tell", expressions, preload=("numpy",))) for _ in range(2)]
    first, second = [json.loads(await receive(child)) for child in children]
    assert first[0] != second[0]
    assert first[1] != second[1]


@in_agent
async def test_preload_once(launcher: Launcher, tmp_path: Path) -> None:
    """A preloaded module runs once for all processes that name it, and what it opened stays open in them."""
    log = tmp_path / "log"
    (tmp_path / "noisy.py").write_text(f"log = open({str(log)!r}, 'a')\nlog.write('imported\\n')\nlog.flush()\n")
    asked = spec("run_code", b"import noisy; noisy.log.write('used\\n')", preload=("noisy",), sys_path=(ROOT, str(tmp_path)))
    children = await asyncio.gather(*[launcher.spawn(asked) for _ in range(3)])
    await asyncio.wait([child.exited for child in children])
    assert "imported\n" == log.read_text()[:9]
    assert 1 == log.read_text().count("imported")
    assert 0 == children[0].exited.result().code, (await end_of(children[0]))[2]


@in_agent
async def test_failing_preload(launcher: Launcher, tmp_path: Path) -> None:
    """A preload that raises fails the spawn with its traceback; other processes start, and so does this one once it is mended."""
    module = tmp_path / "broken.py"
    module.write_text("raise LookupError('not today')\n")
    asked = spec("nothing", preload=("broken",), sys_path=(ROOT, str(tmp_path)))
    for _ in range(2):
        with pytest.raises(SpawnError, match=r"(?s)broken\.py.*LookupError: not today"):
            await launcher.spawn(asked)
    assert 0 == (await (await launcher.spawn(spec("nothing"))).exited).code
    module.write_text("value = 'mended by now'\n")
    assert 0 == (await (await launcher.spawn(asked)).exited).code


@in_agent
async def test_preload_that_kills_its_zygote(launcher: Launcher, tmp_path: Path) -> None:
    """A preload that crashes the interpreter fails the spawn and names the signal."""
    (tmp_path / "crash.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    with pytest.raises(SpawnError, match="SIGSEGV"):
        await launcher.spawn(spec("nothing", preload=("crash",), sys_path=(ROOT, str(tmp_path))))


@in_agent
async def test_failing_entry_import(launcher: Launcher, tmp_path: Path) -> None:
    """An entry whose module or function is missing fails that spawn only."""
    for entry, text in [("no_such_module:main", "No module named"), ("tests.runtime.entries:missing", "has no attribute")]:
        with pytest.raises(SpawnError, match=text):
            await launcher.spawn(spec(entry))
    assert 0 == (await (await launcher.spawn(spec("nothing"))).exited).code


@in_agent
async def test_preload_with_threads_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    """A module that starts a thread when imported can't be preloaded: the thread would be missing in every fork."""
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), name='T9', daemon=True).start()\n"
    )
    with pytest.raises(SpawnError, match=r"threads.*T9"):
        await launcher.spawn(spec("nothing", preload=("threaded",), sys_path=(ROOT, str(tmp_path))))


@in_agent
async def test_impossible_on_this_host(launcher: Launcher, tmp_path: Path) -> None:
    """A directory or CPU that is not there is told before anything is started."""
    with pytest.raises(SpawnError, match="no directory"):
        await launcher.spawn(spec("nothing", cwd=str(tmp_path / "missing")))
    with pytest.raises(SpawnError, match="99999"):
        await launcher.spawn(spec("nothing", cpus=frozenset({99999})))


@in_agent
async def test_eight_at_once(launcher: Launcher, tmp_path: Path) -> None:
    """Eight processes are spawned concurrently, with pids of their own, and all answer."""
    children = await asyncio.gather(*[launcher.spawn(spec("wait")) for _ in range(8)])
    assert ["ready"] * 8 == [await receive(child) for child in children]
    assert 8 == len({child.pid for child in children})


@in_agent
async def test_no_descriptor_leaks(launcher: Launcher, tmp_path: Path) -> None:
    """Fifty processes later the agent, the root and the proc zygote hold what they held after the first."""

    def held() -> list[int]:
        root, zygotes = zygote_pids()
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), root, *zygotes)]

    counts = []
    for number in range(51):
        child = await launcher.spawn(spec("nothing"))
        await child.exited
        child.close()
        if number in (0, 50):
            counts.append(held())
    assert counts[0] == counts[1]


@in_agent
async def test_descriptors_of_a_batch_are_private(launcher: Launcher, tmp_path: Path) -> None:
    """Processes whose requests reached the zygote together don't hold each other's sockets and pipes."""
    payload = json.dumps(["sorted(linux.open_descriptors())"]).encode()
    children = await asyncio.gather(*[launcher.spawn(spec("tell", payload)) for _ in range(6)])
    assert [[[0, 1, 2, 3]]] * 6 == [json.loads(await receive(child)) for child in children]


@in_agent
async def test_cancelled_spawn_leaves_nothing(launcher: Launcher, tmp_path: Path) -> None:
    """Cancelling `spawn`, while its zygote imports or while it forks, leaves no process and no descriptor."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)\n")
    importing = asyncio.create_task(launcher.spawn(spec("wait", preload=("slow",), sys_path=(ROOT, str(tmp_path)))))
    await (await launcher.spawn(spec("nothing"))).exited
    importing.cancel()
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(4):
        task = asyncio.create_task(launcher.spawn(spec("wait")))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # The zygote serves in order, so by now it has forked those, and killing them has been asked for.
    last = await launcher.spawn(spec("nothing"))
    await last.exited
    last.close()
    if killed := [child.exited for child in launcher._children]:
        await asyncio.wait(killed)
    assert before == len(os.listdir("/proc/self/fd"))


@in_agent
async def test_large_payload(launcher: Launcher, tmp_path: Path) -> None:
    """A payload far larger than a socket's buffer arrives whole, while the loop goes on."""
    child = await launcher.spawn(spec("length", bytes(32 << 20)))
    assert str(32 << 20) == await receive(child)


@in_agent
async def test_control_carries_descriptors(launcher: Launcher, tmp_path: Path) -> None:
    """A descriptor sent on the control socket can be used by the process."""
    child = await launcher.spawn(spec("echo_descriptor"))
    read, write = os.pipe()
    socket.send_fds(child.control, [b"it"], [write])
    os.close(write)
    assert 0 == (await child.exited).code
    assert b"got it" == os.read(read, 100)
    os.close(read)


@in_agent
async def test_fork_refused(launcher: Launcher, tmp_path: Path) -> None:
    """When the system has no room for a process, the spawn says so, and others go on."""
    # Root is exempt from this limit, so the zygote becomes someone else; the third line keeps its /proc/self readable.
    (tmp_path / "limited.py").write_text(
        "import ctypes, os, resource\n"
        "os.getuid() or os.setresuid(65534, 65534, 65534)\n"
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"
        "limits = resource.getrlimit(resource.RLIMIT_NPROC)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, limits[1]))\n"
    )
    # The interpreter's own files may be for root only: everything is imported before.
    asked = spec("nothing", preload=("tests.runtime.entries", "limited"), sys_path=(ROOT, str(tmp_path)))
    with pytest.raises(SpawnError, match=r"refused to fork.*ulimit -u"):
        await launcher.spawn(asked)
    assert 0 == (await (await launcher.spawn(spec("nothing"))).exited).code


@pytest.mark.slow
@in_agent
async def test_torch_preload(launcher: Launcher, tmp_path: Path) -> None:
    """Torch, preloaded once, works in two processes, and a variable that its libraries read while loading has its effect."""
    code = b"import torch; control.send(f'{(torch.ones(64, 64) @ torch.ones(64, 64)).sum():.0f} {torch.get_num_threads()}'.encode())"
    asked = [spec("run_code", code, preload=("torch",), env={"OMP_NUM_THREADS": "1"}) for _ in range(2)]
    children = await asyncio.gather(*map(launcher.spawn, asked))
    assert ["262144 1"] * 2 == [await receive(child) for child in children]
    assert [0, 0] == [(await child.exited).code for child in children]


@in_agent
async def test_start_inside_a_loop_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    """A launcher can't be started where a loop runs: its zygote would inherit half of it."""
    with pytest.raises(UsageError, match="event loop"):
        Launcher.start()


def test_spec_refuses_nonsense() -> None:
    """A malformed entry, variable or CPU set is the caller's fault, at once."""
    with pytest.raises(UsageError, match="module:function"):
        ProcSpec(name="x", entry="module.function", env={})
    with pytest.raises(UsageError, match="environment variable"):
        ProcSpec(name="x", entry="m:f", env={"A=B": "c"})
    with pytest.raises(UsageError, match="empty"):
        ProcSpec(name="x", entry="m:f", env={}, cpus=frozenset())


@in_agent
async def test_halted_and_continued_processes_are_told(launcher: Launcher, tmp_path: Path) -> None:
    """Once for each change, and one that is halted ends by SIGKILL as any other."""
    child = await launcher.spawn(spec("wait"))
    changes: asyncio.Queue[bool] = asyncio.Queue()
    child.on_halt = lambda: changes.put_nowait(child.halted)
    for _ in range(2):
        child.signal(signal.SIGSTOP)
        assert await changes.get()
        child.signal(signal.SIGCONT)
        assert not await changes.get()
    child.signal(signal.SIGSTOP)
    assert await changes.get()
    child.kill()
    assert signal.SIGKILL == (await child.exited).signal
    assert changes.empty()
    child.close()


def test_lack_of_memory_is_told_with_the_end() -> None:
    """Where the kernel has said so, and only there."""
    assert "killed by signal 9 (SIGKILL), out of memory" == Exit(signal=9, oom=True).describe()
    assert "killed by signal 9 (SIGKILL)" == Exit(signal=9).describe()
