"""The main function of a worker process, called in a fork of the zygote."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from monarch_async._core.events import Evidence
from monarch_async._runtime.config import ProcConfig
from monarch_async._runtime.connect import join_network
from monarch_async._runtime.context import Message
from monarch_async._runtime.control import Control
from monarch_async._runtime.current import install
from monarch_async._runtime.debug import Debugger
from monarch_async._runtime.loops import new_event_loop
from monarch_async._runtime.pulse import NO_SLOT, inherited_page
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async._runtime.watchdog import Watchdog
from monarch_async.ids import ProcAddress

__all__ = ["run"]


def run(payload: bytes, control: socket.socket) -> None:
    """Be a proc until told to stop."""
    config = ProcConfig.unpack(payload)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, control))


async def _serve(config: ProcConfig, control: socket.socket) -> None:
    service, table = base_service()

    def proc_exited(message: Message, address: ProcAddress, evidence: Evidence) -> None:
        """A process that this one has started is gone."""
        runtime.peer(address).gone(evidence)

    runtime = Runtime(config.me, config.key, config.options, {**table, "proc_exited": proc_exited})
    Debugger(runtime)  # before observers, since it makes the handlers that they watch
    service.bind(runtime)
    runtime.agent, runtime.client = config.agent, config.client
    if config.network is not None:
        join_network(runtime, config.network)
    install(runtime)
    page = inherited_page()
    if page is not None and config.slot != NO_SLOT:
        watchdog = runtime.parts["watchdog"] = Watchdog(runtime, page.slot(config.slot))
        runtime.parts["ages"] = watchdog.ages
        watchdog.start()
    stop = asyncio.Event()
    # Without its agent there is nobody who would end this process and what it has started.
    reader = Control(runtime, control, on_stop=stop.set, on_end=lambda: os._exit(1))
    await stop.wait()
    reader.close()
    await runtime.close("its process was stopped")
