"""``py-spy``, run by the agent of a host: native stacks, and profiles; and profiles without it.

Rules: it never outlives whoever asks, nor the agent. What it says against it is an error that says what to do; a profile is then made by
signals.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_async._runtime.linux import die_with_parent
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.stacks import trim
from monarch_async.errors import UsageError
from monarch_async.observe.doctor import PY_SPY, find_py_spy
from monarch_async.observe.inside.halted import frames_from_outside

if TYPE_CHECKING:  # where there is no agent, what it needs is not loaded either
    from monarch_async._runtime.agent import Agent, Proc

__all__ = ["native_stack", "profile_of"]

LONGEST = 10.0
"""Seconds that `py-spy` may take for one stack, and beyond the time of a profile."""
LONGEST_PROFILE = 600.0
SAMPLES = 100
"""Stacks a second, at most."""


async def spy(*words: str, limit: float = LONGEST) -> str:
    """What `py-spy` says. Raises `UsageError` where it is missing or fails, with what to do."""
    path = find_py_spy()
    if not path:
        raise UsageError("py-spy is not installed on that host: pip install py-spy")
    process = await asyncio.create_subprocess_exec(
        path,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),
    )
    try:
        async with asyncio.timeout(limit):
            out, err = await process.communicate()
    except TimeoutError:
        raise UsageError(f"py-spy did not answer within {limit:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(asyncio.ensure_future(process.wait()))
    if process.returncode:
        said = " ".join(err.decode(errors="replace").partition("Stack backtrace")[0].split())[:500]
        raise UsageError(
            f"py-spy can't look into that process ({said or f'status {process.returncode}'}); see `monarch-async doctor` there"
        )
    return out.decode(errors="replace")


async def native_stack(proc: Proc) -> str:
    """All threads with the frames of C code. The process is held up meanwhile, which one that is frozen can't be: `UsageError`."""
    pid = proc.child.pid
    if proc.child.halted:
        raise UsageError(f"process {pid} is frozen, and so py-spy can't hold it: thaw it, or ask for its stack without --native")
    return await spy("dump", "--native", "--pid", str(pid))


async def profile_of(runtime: Runtime, agent: Agent, uid: str, proc: Proc, seconds: float) -> tuple[int, int, str, str, str]:
    """Pid, samples, tool, collapsed stacks, and a flame graph where the tool draws one. Raises `UsageError`."""
    pid = proc.child.pid
    if not 0 < seconds <= LONGEST_PROFILE:
        raise UsageError(f"a profile takes more than 0 s and at most {LONGEST_PROFILE:g} s, not {seconds:g} s")
    if proc.child.halted:
        raise UsageError(f"process {pid} is frozen, so that it spends no time anywhere: thaw it")
    if find_py_spy():
        try:
            folded = await _record(os.path.dirname(runtime.me.unix), pid, seconds)
        except UsageError as error:
            runtime.log.info("the profile of %s is made by signals: %s", proc.request.me, error)
        else:
            return pid, sum(int(line.rpartition(" ")[2]) for line in folded.splitlines()), PY_SPY, folded, ""
    counted: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not proc.ended.done():
        due = time.monotonic() + 1 / SAMPLES
        frames = await frames_from_outside(agent, uid, pid)
        names = [f"{function} ({os.path.basename(file)}:{line})" for file, line, function in reversed(trim(frames))]
        counted[";".join(names) or "(no answer)"] += 1
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    folded = "\n".join(f"{names} {count}" for names, count in counted.most_common())
    return pid, counted.total(), "signals", folded, ""


async def _record(folder: str, pid: int, seconds: float) -> str:
    """Collapsed stacks."""
    path = Path(folder) / f"profile-{pid}-{time.monotonic_ns()}"
    words = ("record", "--format", "raw", "--idle", "--rate", str(SAMPLES), "--duration", str(max(1, round(seconds))))
    try:
        await spy(*words, "--pid", str(pid), "--output", str(path), limit=seconds + LONGEST)
        return _without_plumbing(path.read_text(encoding="utf-8", errors="replace"))
    finally:
        path.unlink(missing_ok=True)


def _without_plumbing(folded: str) -> str:
    """The same without the calls that led to the user's code, and without the watchdog, which only sleeps."""
    counted: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, number = line.rpartition(" ")
        names = stack.split(";")
        if "Watchdog._watch" not in stack:
            first = next((index for index, name in enumerate(names) if not _PLUMBING.search(name)), len(names) - 1)
            counted[";".join(names[first:])] += int(number)
    return "\n".join(f"{names} {count}" for names, count in counted.most_common())


_PLUMBING = re.compile(r"\((?:monarch_async/_|asyncio/|threading\.py|<string>)")
