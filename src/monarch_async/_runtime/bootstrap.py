"""What a fresh interpreter runs to become the agent of a client: ``main(fd)``, `fd` being its control socket to that client.

The order matters: read the configuration, fork the zygote while there is no loop and no thread, then serve. When the client closes the
socket, or is gone, everything below ends, and the files too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys

from monarch_async._channel.dial import listen_unix
from monarch_async._core.events import Evidence
from monarch_async._runtime.agent import Agent
from monarch_async._runtime.config import AgentConfig
from monarch_async._runtime.control import Control
from monarch_async._runtime.launcher import Launcher
from monarch_async._runtime.loops import new_event_loop
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service

__all__ = ["READY", "main"]

READY = b"r"
_MAX_CONFIG = 1 << 20


def main(fd: int) -> None:
    """Be an agent until the client is done. Called by `client.start_agent` with ``python -c``."""
    control = socket.socket(fileno=fd)
    client_pidfd = os.pidfd_open(os.getppid())
    config = AgentConfig.unpack(control.recv(_MAX_CONFIG))
    sys.path[:] = config.sys_path
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    launcher = Launcher.start()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(config, launcher, control, client_pidfd))
    finally:
        launcher.close()
        shutil.rmtree(config.directory, ignore_errors=True)


class _ClientTarget:
    """The client, as connections to it are routed."""

    def __init__(self, control: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.control = control
        self.ended: asyncio.Future[Evidence] = loop.create_future()


async def _serve(config: AgentConfig, launcher: Launcher, control: socket.socket, client_pidfd: int) -> None:
    agent = Agent(launcher)
    service, table = base_service()
    runtime = Runtime(config.agent, config.key, config.options, {**table, **agent.table})
    service.bind(runtime)
    agent.bind(runtime)
    broker = agent.broker
    runtime.tasks.start(broker.serve(listen_unix(config.agent.unix)), name="listening")
    broker.announce(config.client.uid)
    broker.started(config.client.uid, _ClientTarget(control, runtime.loop))
    asked = asyncio.Event()
    gone = asyncio.Event()
    reader = Control(runtime, control, on_stop=asked.set, on_end=gone.set)
    # A child that the client has forked may hold its end of the socket open, so the process itself is watched too.
    runtime.loop.add_reader(client_pidfd, gone.set)
    control.send(READY)
    launcher.lost.add_done_callback(lambda _: gone.set())
    ends = [asyncio.ensure_future(event.wait()) for event in (asked, gone)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    runtime.loop.remove_reader(client_pidfd)
    await agent.close(config.options.stop_timeout if asked.is_set() and not gone.is_set() else 0.0)
    reader.close()
    await runtime.close("the job has ended")
