"""Who waits for whom, seen from one process: its calls without an answer, and where its handlers stand."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from monarch_async._core.framing import CALL
from monarch_async._runtime.cell import Cell
from monarch_async._runtime.chains import chain_of, stand_of, story_of
from monarch_async._runtime.context import Message, State, Waiter
from monarch_async._runtime.link import Link
from monarch_async._runtime.runtime import SERVICE, Runtime
from monarch_async._runtime.stacks import frames_of, is_plumbing, render
from monarch_async._runtime.waits import waiting_for
from monarch_async.observe.inside.cells import Name, find_cells, running

__all__ = ["calls", "handlers", "stack_here"]

MOST_CALLS = 10_000
MOST_TASKS = 50
MOST_FRAMES = 200
"""Frames that are looked into for the names of endpoints."""

Handlers = dict[asyncio.Future[Any], tuple[Cell, Message]]


def _handlers_by_task(runtime: Runtime) -> Handlers:
    found: Handlers = {}
    for cell in list(runtime.busy):
        if cell.task is not None and cell.current is not None:
            found[cell.task] = cell, cell.current
        for message in list(cell.overlapping):
            if message.task is not None:
                found[message.task] = cell, message
    return found


def _waits(waiter: Waiter, handlers: Handlers) -> tuple[str, bool]:
    """Who waits for an answer, and whether that can't go on without it."""
    if waiter.awaited_by is not None and waiter.awaited_by.cell is not None:
        return f"{waiter.awaited_by.cell.identity}.{waiter.awaited_by.endpoint}", True
    task = ""
    for future in waiter.futures():
        for end in waiting_for(future):
            if end in handlers:
                cell, message = handlers[end]
                return f"{cell.identity}.{message.endpoint}", True
            if isinstance(end, asyncio.Task):
                task = end.get_name()
    return f"task {task}" if task else "", bool(task)


def calls(runtime: Runtime) -> dict[str, list[tuple[Any, ...]]]:
    """`made`: who waits, whether it must, uid of the process, key, mesh, rank, request, age, endpoint where known, state where known.

    `got`: uid of the process it came from, request, actor, endpoint, state, for how long it has run, who has asked.
    """
    now = time.monotonic()
    ages = runtime.parts.get("ages")
    handlers = _handlers_by_task(runtime)
    made: list[tuple[Any, ...]] = []
    got: list[tuple[Any, ...]] = []
    for link in runtime.links:
        peer = runtime.peer_of(link)
        pending = [entry for entry in link.pending.items() if entry[1][1].key != SERVICE]
        names = _undelivered(link) if pending else {}
        for request, (waiter, lane, _) in pending[: MOST_CALLS - len(made)]:
            who, blocks = _waits(waiter, handlers)
            age = ages.age(request, now) if ages is not None else 0.0
            state = "running" if request in link.started else ""
            made.append((who, blocks, peer.address.uid, lane.key, lane.mesh, lane.rank, request, age, names.get(request, ""), state))
        for request, message in list(link.inbound_calls.items())[: MOST_CALLS - len(got)]:
            if message.cell is not None:
                got.append((peer.address.uid, request, *_taken(runtime, message)))
    for request, message in list(runtime.local_calls.items())[: MOST_CALLS - len(made)]:
        if message.cell is None or message.waiter is None:
            continue
        who, blocks = _waits(message.waiter, handlers)
        identity = message.cell.identity
        age = ages.age(request, now) if ages is not None else 0.0
        state = "running" if message.state is State.RUNNING else "queued"
        entry = (runtime.me.uid, message.cell.key, identity.mesh, identity.rank, request, age, message.endpoint, state)
        made.append((who, blocks, *entry))
    return {"made": made, "got": got}


def _taken(runtime: Runtime, message: Message) -> tuple[Any, ...]:
    cell = message.cell
    state = "running" if message.state is State.RUNNING else "queued"
    age = next((age for other, age in running(runtime, cell) if other is message), 0.0)
    chain = (message.extras or {}).get("c", ())
    return str(cell.identity), message.endpoint, state, age, chain[-1][3] if chain else ""


def _undelivered(link: Link) -> dict[int, str]:
    """The endpoints of calls that the other side has not acknowledged, by request: a process that is stuck acknowledges nothing."""
    found: dict[int, str] = {}
    for header in link.undelivered()[:MOST_FRAMES]:
        for fields in msgpack.unpackb(header, strict_map_key=False):
            if fields[0] == CALL:
                found[fields[3]] = fields[2]
    return found


def handlers(runtime: Runtime, names: Sequence[Name]) -> list[dict[str, Any]]:
    """For each handler that runs in these actors: where it stands, and the requests it waits for."""
    found = []
    by_task = _handlers_by_task(runtime)
    waits: dict[Message, list[tuple[str, int, str, int, int]]] = {}
    for uid, waiter, lane, request in _pending(runtime):
        message = waiter.awaited_by
        if message is None:
            ends = (end for future in waiter.futures() for end in waiting_for(future))
            message = next((by_task[end][1] for end in ends if end in by_task), None)
        if message is not None:
            waits.setdefault(message, []).append((uid, request, lane.mesh, lane.rank, lane.key))
    for cell in find_cells(runtime, names):
        for message, age in running(runtime, cell):
            frames, inner = stand_of(cell, message)
            found.append(
                {
                    "actor": str(cell.identity),
                    "endpoint": message.endpoint,
                    "age": age,
                    "frames": frames,
                    "inner": inner,
                    "waits": waits.get(message, []),
                }
            )
        if cell.current is None and not cell.overlapping:
            found.append({"actor": str(cell.identity), "endpoint": "", "age": None, "frames": [], "inner": str(cell.state), "waits": []})
    return found


def _pending(runtime: Runtime) -> Iterator[tuple[str, Waiter, Any, int]]:
    for link in runtime.links:
        uid = runtime.peer_of(link).address.uid
        for request, (waiter, lane, _) in list(link.pending.items())[:MOST_CALLS]:
            if lane.key != SERVICE:
                yield uid, waiter, lane, request
    for request, message in list(runtime.local_calls.items())[:MOST_CALLS]:
        if message.waiter is not None and message.lane.key != SERVICE:
            yield runtime.me.uid, message.waiter, message.lane, request


def _other_tasks(runtime: Runtime) -> list[str]:
    """Where tasks of the user's stand that are no handlers, such as the program itself."""
    handlers = _handlers_by_task(runtime)
    found = []
    for task in asyncio.all_tasks(runtime.loop):
        if task not in handlers and task is not asyncio.current_task():
            frames, inner = chain_of(task.get_coro())
            if frames:
                found.append(f"task {task.get_name()}, in {inner}:\n{render(frames[::-1])}")
    return sorted(found)[:MOST_TASKS]


def stack_here(runtime: Runtime) -> str:
    """The handlers that wait, other tasks, and the threads that run, as this process sees them itself; empty where nothing does."""
    parts = [story_of(cell, message, age) for cell in list(runtime.busy) for message, age in running(runtime, cell)]
    parts += _other_tasks(runtime)
    known = {threading.get_ident()} | {cell.thread.thread.ident for cell in runtime.cells.values() if cell.thread is not None}
    for ident, frame in sys._current_frames().items():
        if ident not in known and (text := render(frames_of(frame))) and not is_plumbing(frame.f_code.co_filename):
            parts.append(f"thread {ident:#x}:\n{text}")
    return "\n".join(parts)
