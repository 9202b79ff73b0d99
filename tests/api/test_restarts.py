"""Restart policies of actors and processes: every way to end under every mode, and what the world sees of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import time
from functools import partial
from typing import Any

import pytest

from monarch_async import ActorDied, ActorError, MeshFailure, ProcMesh, Restart, this_host
from monarch_async._core.instructions import Exit, Life
from monarch_async._runtime.restarts import Driver
from tests.api.restarting import ENDS, Diary, Member, SyncMember, answers, back
from tests.api.waiting import until

pytestmark = pytest.mark.usefixtures("complaints")

COMES_BACK = {"permanent": ENDS, "transient": ("raise", "exit3", "kill"), "temporary": ()}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("mode", COMES_BACK)
async def test_modes_and_ends_of_actors(failures: list[MeshFailure], mode: Any, how: str) -> None:
    """An actor with a policy, in a process without one, comes back or not as its mode says, and so does its process for that.

    The end of a process that nobody wants back is a failure of the mesh of processes, which has no policy.
    """
    procs = this_host().spawn_procs({"gpus": 2}, name="procs")
    members = procs.spawn("members", Member, restart=Restart(mode=mode))
    before = list((await members.life.call()).values())
    members.slice(gpus=0).end.broadcast(how)
    after = await answers(members.slice(gpus=0).life.call_one())
    if isinstance(after, ActorDied):  # it was under way to a process that died, or it is gone for good
        after = await answers(members.slice(gpus=0).life.call_one())
    if how in COMES_BACK[mode]:
        pid, incarnation = after
        assert 1 == incarnation
        assert (pid == before[0][0]) is (how in ("raise", "leave"))
    else:
        assert isinstance(after, ActorDied)
    assert before[1] == await members.slice(gpus=1).life.call_one()
    lost = how not in COMES_BACK[mode] and how not in ("raise", "leave")
    assert [("procs",)] * lost == [told.meshes for told in failures]


@pytest.mark.parametrize("how", ["exit0", "exit3", "kill"])
@pytest.mark.parametrize("mode", COMES_BACK)
async def test_modes_and_ends_of_processes(failures: list[MeshFailure], mode: Any, how: str) -> None:
    """Under the policy of its process an actor without one comes back with that, or is a failure for its owner, once."""
    procs = this_host().spawn_procs({"gpus": 2}, name="procs", restart=Restart(mode=mode))
    members = procs.spawn("members", Member)
    before = list((await members.life.call()).values())
    members.slice(gpus=0).end.broadcast(how)
    await until(lambda: not os.path.exists(f"/proc/{before[0][0]}"))
    after = await answers(members.slice(gpus=0).life.call_one())
    if how in COMES_BACK[mode]:
        if isinstance(after, ActorDied):
            after = await answers(members.slice(gpus=0).life.call_one())
        assert 1 == after[1]
        assert after[0] != before[0][0]
        assert [] == failures
    else:
        assert isinstance(after, ActorDied)
        await until(lambda: failures)
        assert [("members", (0,), {"exit0": 0, "exit3": 3, "kill": None}[how])] == [
            (told.mesh, told.ranks, told.exit_code) for told in failures
        ]
    assert before[1] == await members.slice(gpus=1).life.call_one()


@pytest.mark.parametrize("mode", COMES_BACK)
async def test_modes_and_constructors(diary: Diary, failures: list[MeshFailure], mode: Any) -> None:
    """Case 1: with two restarts a constructor that fails is called three times, a temporary one once; then awaiting raises its error."""
    open(f"{diary.path}.fail", "w").close()
    procs = this_host().spawn_procs()
    member = procs.spawn("member", Member, diary, restart=Restart(mode=mode, max_restarts=2))
    async with asyncio.timeout(5):
        with pytest.raises(ValueError, match="bad") as caught:
            await member
    assert isinstance(caught.value, ActorError)
    assert "in __init__" in caught.value.remote_traceback
    count = 1 if mode == "temporary" else 3
    assert [f"start member 0 {life}" for life in range(count)] == diary.lines("start")
    with pytest.raises(ActorDied, match="bad"):
        await member.add.call_one()
    await asyncio.sleep(1.1)
    assert [] == failures
    again = procs.spawn("again", SyncMember)
    assert 1 == await again.add.call_one()


async def test_a_constructor_that_fails_too_often_and_nobody_waits(diary: Diary, failures: list[MeshFailure]) -> None:
    """The owner is told once, with the reason and that the budget is used up."""
    open(f"{diary.path}.fail", "w").close()
    this_host().spawn_procs().spawn("member", Member, diary, restart=Restart(max_restarts=1))
    await until(lambda: failures, 10)
    assert ["ValueError in __init__: bad; not started again: 1 restart within 5 s allowed, this would be the 2nd"] == [
        told.reason for told in failures
    ]
    assert [("member", (0,), 1)] == [(told.mesh, told.ranks, told.incarnation) for told in failures]


async def test_a_constructor_that_fails_at_first(diary: Diary, failures: list[MeshFailure]) -> None:
    """Awaiting the mesh waits for the life that succeeds; what was sent before goes to that."""
    fail = f"{diary.path}.fail"
    open(fail, "w").close()
    member = this_host().spawn_procs().spawn("member", Member, diary, restart=Restart(backoff=0.2))
    sum_ = member.add.call_one(2)
    await until(lambda: diary.lines("start"))
    os.remove(fail)
    await member
    assert 2 == await sum_
    assert 1 == (await member.life.call_one())[1]
    assert [] == failures


async def test_case_4_a_crash_loop(failures: list[MeshFailure]) -> None:
    """Incarnations 0 to 3 with growing delays, then the end, which names code 3; the name never changes; a new mesh spawns on the host."""
    host = this_host()
    procs = host.spawn_procs(name="crashing", restart=Restart(max_restarts=3, within=10, backoff=0.1))
    member = procs.spawn("member", Member)
    seen, times = [], [time.monotonic()]
    for _ in range(4):
        life = await answers(member.life.call_one())
        seen.append(life[1])
        times.append(time.monotonic())
        died = await answers(member.end.call_one("exit3"))
        assert ("member", 0, 3, life[1]) == (died.mesh, died.rank, died.exit_code, died.incarnation)
    assert [0, 1, 2, 3] == seen
    delays = [after - before for before, after in itertools.pairwise(times[1:])]
    assert delays == sorted(delays)
    await until(lambda: failures)
    assert [("member", (0,), 3, 3)] == [(told.mesh, told.ranks, told.exit_code, told.incarnation) for told in failures]
    assert failures[0].reason.startswith("process crashing[0] exited with code 3; not started again: 3 restarts within 10 s allowed")
    assert ("crashing", "member") == failures[0].meshes
    died = await answers(member.life.call_one())
    assert 3 == died.exit_code
    assert "not started again" in died.reason
    another = host.spawn_procs().spawn("member", Member)
    assert 0 == (await another.life.call_one())[1]


async def test_case_5_no_silent_replay(diary: Diary) -> None:
    """SIGKILL in mid-call: an error and one line by default; a result and two lines with ``retry=1``."""
    member = this_host().spawn_procs(restart=Restart()).spawn("member", Member, diary)
    for retry in (0, 1):
        pid, _ = await member.life.call_one()
        call = member.wait.options(retry=retry).call_one(0.5, f"wait {retry}")
        await until(partial(diary.lines, f"wait {retry}"))
        await asyncio.sleep(0.1)  # until it is known that the handler has begun
        os.kill(pid, signal.SIGKILL)
        outcome = await answers(call)
        if retry:
            assert "waited" == outcome
        else:
            assert (9, True) == (outcome.signal, outcome.started)
        assert 1 + retry == len(diary.lines(f"wait {retry}"))


async def test_the_mailbox_survives_a_failed_handler() -> None:
    """Without the message that failed, in order, casts and calls; calls wait within their deadline."""
    member = this_host().spawn_procs().spawn("member", Member, restart=Restart(backoff=0.2))
    await member
    member.add.broadcast(100)
    member.end.broadcast("raise")
    late = member.add.options(timeout=0.1).call_one(50)
    sums = [member.add.call_one(number) for number in range(1, 6)]
    with pytest.raises(TimeoutError):
        await late
    assert [1, 3, 6, 10, 15] == await asyncio.gather(*sums)


async def test_what_is_under_way_when_a_process_dies(failures: list[MeshFailure]) -> None:
    """The running call is told that it had started, the queued that they had, or may have, not; later ones go to the next life."""
    member = this_host().spawn_procs(restart=Restart()).spawn("member", Member)
    pid, _ = await member.life.call_one()
    running = member.wait.call_one(30)
    queued = [member.add.call_one() for _ in range(3)]
    await asyncio.sleep(0.15)
    os.kill(pid, signal.SIGKILL)
    assert True is (await answers(running)).started
    assert [ActorDied] * 3 == [type(await answers(call)) for call in queued]
    assert 1 == await member.add.call_one()
    assert [] == failures


async def test_arguments_environment_bootstrap_and_rank_are_as_before() -> None:
    """Also those that differ by rank."""
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap, env=lambda point: {"MINE": str(point.rank)}, restart=Restart())
    members = procs.spawn("members", Member, None, "given")
    pids = [pid for pid, _ in (await members.life.call()).values()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for rank in range(2):
        member = members.slice(gpus=rank)
        await back(member, 1)
        assert (str(rank), "yes") == (await member.variable.call_one("MINE"), await member.variable.call_one("BOOTED"))


def bootstrap() -> None:
    os.environ["BOOTED"] = "yes"


@pytest.mark.parametrize("cls", [Member, SyncMember])
async def test_here_and_in_a_thread(place: ProcMesh, cls: type[Member]) -> None:
    """An actor comes back in its process, this one too, and with its own thread."""
    member = place.spawn("member", cls, restart=Restart(max_restarts=10))
    for life in range(5):
        assert (life, 1) == ((await member.life.call_one())[1], await member.add.call_one())
        member.end.broadcast("raise" if life % 2 else "leave")
    await member.stop("done")
    with pytest.raises(ActorDied, match="stopped"):
        await member.add.call_one()


async def test_a_mesh_awaited_while_it_is_restarted() -> None:
    """A probe by a reference waits until the actor is up again."""
    member = this_host().spawn_procs().spawn("member", Member, restart=Restart(backoff=0.2))
    await member
    reference = pickle.loads(pickle.dumps(member))
    member.end.broadcast("raise")
    await reference
    assert 1 == (await member.life.call_one())[1]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why each life has ended, as the owner's policy is told."""
    told: list[str] = []
    exited = Driver.exited

    def note(driver: Driver, life: Life, reason: Exit, failure: MeshFailure) -> None:
        told.append(f"{life} {reason.value}: {failure.reason}")
        exited(driver, life, reason, failure)

    monkeypatch.setattr(Driver, "exited", note)
    return told


async def test_bounds_do_not_shrink_with_restarts(place: ProcMesh, ends: list[str]) -> None:
    """Nor grow: after many lives as many messages may be under way as before. And nothing ends but what was told to."""
    member = place.options(mailbox_messages=4).spawn("member", Member, restart=Restart(max_restarts=10_000))
    for _ in range(200):
        member.end.broadcast("raise")
        member.add.broadcast()
        await member.add.call_one()
    endpoint: Any = member.add
    await until(lambda: not endpoint.lanes[0].messages)
    assert (200, []) == ((await member.life.call_one())[1], [text for text in ends if "blew up" not in text])
