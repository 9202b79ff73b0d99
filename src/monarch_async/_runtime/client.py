"""The client's side of a job: start the agent, be a runtime in the running loop, end both.

The job's files are in a private directory, its key in memory and in the agent's, handed over a socket: never in an argument or an
environment variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monarch_async._channel.keys import generate_key
from monarch_async._core.events import Evidence
from monarch_async._core.lines import OutputFolder, Stream
from monarch_async._runtime.bootstrap import READY
from monarch_async._runtime.config import AgentConfig
from monarch_async._runtime.context import Message
from monarch_async._runtime.control import STOP, Control
from monarch_async._runtime.current import install, uninstall
from monarch_async._runtime.runtime import Runtime
from monarch_async._runtime.service import base_service
from monarch_async.errors import SpawnError
from monarch_async.ids import ProcAddress, new_uid
from monarch_async.options import Options

__all__ = ["Client"]

_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from monarch_async._runtime.bootstrap import main; main(int(sys.argv[1]))"
_PACKAGE_PARENT = str(Path(__file__).parents[2])


class Client:
    """A runtime for the program itself, and its agent. Make it in the loop that it shall live in; `close` ends the whole job."""

    guardian: asyncio.Task[None]
    """Ends the job when the loop does; see `ambient`."""

    def __init__(self, options: Options, key: bytes | None = None) -> None:
        uid, agent_uid, host = new_uid(), new_uid(), new_uid()
        self.directory = tempfile.mkdtemp(prefix="monarch-async-")
        unix = os.path.join(self.directory, "agent")
        self.agent = ProcAddress(agent_uid, host, unix, name="agent")
        me = ProcAddress(uid, host, unix, name="client")
        self._folder = OutputFolder(options.fold_window)
        self._show_timer: asyncio.TimerHandle | None = None
        service, table = base_service()
        self.runtime = Runtime(me, key or generate_key(), options, {**table, **self.table})
        service.bind(self.runtime)
        self.runtime.agent, self.runtime.client = self.agent, me
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        self._ready = self.runtime.agent_up = self.runtime.loop.create_future()
        self._closed = False
        install(self.runtime)

    def start_agent(self) -> None:
        """Start the agent of this host, if it was not started before."""
        if self._process is not None:
            return
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), _PACKAGE_PARENT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        runtime = self.runtime
        config = AgentConfig(self.agent, runtime.me, runtime.key, self._options, self.directory, tuple(sys.path))
        self._ours.send(config.pack())
        runtime.loop.add_reader(self._ours.fileno(), self._first_answer)

    @property
    def table(self) -> Mapping[str, Callable[..., Any]]:
        return {"output": self.output, "proc_exited": self.proc_exited}

    def _first_answer(self) -> None:
        """The agent is up, or ended before it was."""
        loop = self.runtime.loop
        loop.remove_reader(self._ours.fileno())
        try:
            answer = self._ours.recv(1)
        except OSError:
            answer = b""
        if answer == READY:
            self._control = Control(self.runtime, self._ours, on_stop=lambda: None, on_end=self._agent_died)
            self._ready.set_result(None)
        else:
            self._ours.close()
            self._ready.set_exception(SpawnError("the host agent could not be started; its output above says why"))
            self._ready.exception()

    async def ready(self) -> None:
        """Wait until the agent serves. Raises `SpawnError`."""
        await asyncio.shield(self._ready)

    def _agent_died(self) -> None:
        if not self._closed and self._process is not None:
            code = self._process.poll()
            evidence = Evidence(f"the agent of this host is gone (exit status {code})")
            for peer in list(self.runtime.peers.values()):
                if peer.address.host == self.runtime.me.host:
                    peer.gone(evidence)

    # What the agent tells.

    def proc_exited(self, message: Message, address: ProcAddress, evidence: Evidence) -> None:
        """A process that this runtime has started is gone."""
        self.runtime.peer(address).gone(evidence)

    def output(self, message: Message, mesh: str, rank: int, size: int, stream: Stream, lines: list[str]) -> None:
        """A process has printed something."""
        now = self.runtime.loop.time()
        for line in lines:
            self._folder.add(mesh, rank, size, stream, line, now)
        self._show()

    def _show(self) -> None:
        now = self.runtime.loop.time()
        if self._show_timer is not None:
            self._show_timer.cancel()
            self._show_timer = None
        self._print(self._folder.poll(now))
        deadline = self._folder.next_deadline()
        if deadline is not None:
            self._show_timer = self.runtime.loop.call_at(deadline, self._show)

    def _print(self, shown: list[Any]) -> None:
        for stream, text in shown:
            print(text, file=sys.stdout if stream == "stdout" else sys.stderr)
        if shown:
            sys.stdout.flush()

    # The end.

    async def close(self) -> None:
        """Stop everything that this client has started, the agent too; returns when it is gone."""
        if self._closed:
            return
        self._closed = True
        runtime = self.runtime
        loop = runtime.loop
        await runtime.stop_cells("the job has ended")
        runtime.ownership.clear()
        if self._process is not None:
            if self._control is not None:
                with contextlib.suppress(OSError):  # it may be gone already
                    self._ours.send(STOP)
            else:
                loop.remove_reader(self._ours.fileno())
                self._ours.close()
            await asyncio.shield(self._wait_for_agent(self._process))
        if self._show_timer is not None:
            self._show_timer.cancel()
        self._print(self._folder.flush())
        await runtime.close("the job has ended")
        if self._control is not None:
            self._control.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        uninstall(runtime)

    async def _wait_for_agent(self, process: subprocess.Popen[bytes]) -> None:
        """Until the agent has ended, by force if it takes longer than it may."""
        pidfd = os.pidfd_open(process.pid)
        loop = self.runtime.loop
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(self.runtime.options.stop_timeout + 2.0):
                await ended.wait()
        except TimeoutError:
            process.kill()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        process.wait()

    def abandon(self) -> None:
        """The loop is gone: let the agent see the end of the socket, which ends everything."""
        if not self._closed:
            self._closed = True
            uninstall(self.runtime)
            if self._process is not None:
                self._ours.close()
                self._process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)
