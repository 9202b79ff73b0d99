"""What a fresh interpreter runs to become an agent: ``main(fd)``, `fd` being its control socket to the process that started it.

That is the client on the client's own host, and a worker (`worker.py`) elsewhere. The order matters: read the configuration, fork the
zygote while there is no loop and no thread, then serve. Everything below ends, and the files too, when whoever started it is gone or says
so, and on another host than the client's also when the client has said goodbye or was out of reach for the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence

from monarch_async._channel.dial import listen_unix
from monarch_async._core.events import Evidence
from monarch_async._runtime.agent import Agent
from monarch_async._runtime.child import Exit
from monarch_async._runtime.config import AgentConfig
from monarch_async._runtime.control import ENDING, Control, ControlWriter
from monarch_async._runtime.jobfile import remove_job_file
from monarch_async._runtime.launcher import Launcher
from monarch_async._runtime.loops import loop_factory
from monarch_async._runtime.peer import Peer
from monarch_async._runtime.pulse import make_page
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async._runtime.start import READY, remove_directory

__all__ = ["main"]

LAST_ANSWERS = 0.2
"""Seconds for which an agent that has lost its zygotes still tells what became of their processes."""
_MAX_CONFIG = 1 << 20


def main(fd: int) -> None:
    """Be an agent. Called by `start_agent` with ``python -c``."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    config = AgentConfig.unpack(control.recv(_MAX_CONFIG))
    parent = os.pidfd_open(config.parent) if os.getppid() == config.parent else -1
    if parent < 0:
        remove_directory(config.directory)
        return  # it is gone already
    sys.path[:] = config.sys_path
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    factory = loop_factory()  # now, so that the zygotes have what it needs
    make_page()
    launcher = Launcher.start()
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_serve(config, launcher, control, parent))
    finally:
        launcher.close()
        remove_directory(config.directory)
        remove_job_file(config.agent.uid)


class _ClientTarget:
    """The client on this host, as connections to it are routed."""

    def __init__(self, control: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.control = ControlWriter(loop, control)
        self.ended: asyncio.Future[Evidence] = loop.create_future()


async def _serve(config: AgentConfig, launcher: Launcher, control: socket.socket, parent: int) -> None:
    agent = Agent(launcher)
    service, table = base_service()
    runtime = Runtime(config.agent, config.key, config.options, {**table, **agent.table})
    service.bind(runtime)
    runtime.client = config.client
    agent.bind(runtime, config.network)
    broker = agent.broker
    runtime.tasks.start(broker.serve(listen_unix(config.agent.unix)), name="listening")
    gone = asyncio.Event()
    if config.client.host == config.agent.host:
        broker.announce(config.client.uid)
        broker.started(config.client.uid, _ClientTarget(control, runtime.loop))
    else:
        _follow_client(runtime, agent.ending, gone)
    asked = agent.ending
    reader = Control(runtime, control, on_stop=asked.set, on_end=gone.set, on_route=broker.take)
    # A child that the parent has forked may hold its end of the socket open, so the process itself is watched too.
    runtime.loop.add_reader(parent, gone.set)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # gone before this one was up, as `reader` will say
        control.send(READY)

    def lost(done: asyncio.Future[Exit]) -> None:
        control.send(ENDING + f"its root zygote was lost ({done.result().describe()})".encode())
        gone.set()

    launcher.lost.add_done_callback(lost)
    await _first([asked, gone])
    runtime.loop.remove_reader(parent)
    os.close(parent)
    if launcher.lost.done():
        await asyncio.sleep(LAST_ANSWERS)
    await agent.close(config.options.stop_timeout if asked.is_set() and not gone.is_set() else 0.0)
    reader.close()
    await runtime.close("the job has ended")


def _follow_client(runtime: Runtime, asked: asyncio.Event, gone: asyncio.Event) -> None:
    """Set `gone` when there is no link with the client any more, or none within the lease."""
    client = runtime.client.uid

    def none_yet() -> None:
        if client not in runtime.peers or not runtime.peers[client].links:
            gone.set()

    def ended(peer: Peer, evidence: Evidence) -> None:
        if peer.address.uid != client or peer.links:
            return
        if runtime.stopping is None and not asked.is_set():
            runtime.log.warning("%s: the job's processes here are ended, for its client %s", runtime.me, evidence.text)
        gone.set()

    runtime.loop.call_later(runtime.options.lease, none_yet)
    runtime.on_link_ended.append(ended)


async def _first(events: Sequence[asyncio.Event]) -> None:
    """Until one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
