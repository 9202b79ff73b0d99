"""Two hosts as two network namespaces: a client in one, a worker in the other, and a router between them that can be told to drop all.

`on_two_hosts` makes a test of a coroutine function, which runs as the program in the client's namespace, in a process of its own, once on
each kind of loop. It gets a `Net`, by which it can cut the wire. Nothing may be left on the worker's host at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import monarch_async
from monarch_async import HostMesh, attach_to_workers, configure
from tests.hosts.workers import ENVIRONMENT, ROOT, command, make_key

CLIENT, WORKER = "10.98.1.1", "10.98.2.1"
LEASE, HEARTBEAT = 4.0, 0.4

Body = Callable[["Net"], Awaitable[None]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def router_of(address: str) -> str:
    """The router's address on the wire of a host."""
    return address.removesuffix("1") + "254"


def forward(namespace: str, value: str) -> None:
    """Have a namespace forward packets, or drop them without a word."""
    ip("netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/ip_forward")


class Net:
    """The wire between the hosts, and the worker at its other end."""

    def __init__(self, prefix: str, worker: subprocess.Popen[str], key_file: str) -> None:
        self.prefix = prefix
        self.worker = worker
        self.key_file = key_file
        assert worker.stdout is not None
        self.url = worker.stdout.readline().split()[-1]

    def attach(self, **settings: Any) -> HostMesh:
        """The worker's host."""
        configure(**{"lease": LEASE, "heartbeat": HEARTBEAT, **settings})
        return attach_to_workers([self.url], key=self.key_file)

    def drop(self) -> None:
        """From now on packets get lost, and nobody is told."""
        self._forward("0")

    def pass_on(self) -> None:
        """Packets arrive again."""
        self._forward("1")

    def _forward(self, value: str) -> None:
        forward(f"{self.prefix}r", value)

    def pull(self) -> None:
        """Take the worker's interface down."""
        ip("-n", f"{self.prefix}w", "link", "set", "eth", "down")

    def plug(self) -> None:
        """And up."""
        ip("-n", f"{self.prefix}w", "link", "set", "eth", "up")
        ip("-n", f"{self.prefix}w", "route", "add", "default", "via", router_of(WORKER))

    def procs(self) -> list[psutil.Process]:
        """What runs below the worker."""
        return list(psutil.Process(self.worker.pid).children(recursive=True))

    async def wait_no_procs(self, timeout: float) -> None:
        """Until nothing runs below the worker; raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            for process in self.procs():
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(process.pid)
                    gone = asyncio.Event()
                    asyncio.get_running_loop().add_reader(pidfd, gone.set)
                    try:
                        await gone.wait()
                    finally:
                        asyncio.get_running_loop().remove_reader(pidfd)
                        os.close(pidfd)


@contextlib.contextmanager
def namespaces(prefix: str) -> Iterator[None]:
    """Make the hosts and the router, and remove them."""
    names = [f"{prefix}{host}" for host in "cwr"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        router = names[2]
        forward(router, "1")
        for host, address in zip("cw", (CLIENT, WORKER), strict=True):
            ip("link", "add", f"{prefix}{host}", "type", "veth", "peer", "name", f"{prefix}x")
            ip("link", "set", f"{prefix}x", "netns", f"{prefix}{host}", "name", "eth")
            ip("link", "set", f"{prefix}{host}", "netns", router, "name", host)
            ip("-n", router, "address", "add", f"{router_of(address)}/24", "dev", host)
            ip("-n", router, "link", "set", host, "up")
            ip("-n", f"{prefix}{host}", "address", "add", f"{address}/24", "dev", "eth")
            ip("-n", f"{prefix}{host}", "link", "set", "eth", "up")
            ip("-n", f"{prefix}{host}", "route", "add", "default", "via", router_of(address))
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_two_hosts(body: Body) -> Callable[..., None]:
    """A test that runs ``body(net)`` as a program on the client's host."""

    @pytest.mark.netns
    @pytest.mark.parametrize("loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.slow)])
    def test(loop: str, tmp_path: Path) -> None:
        prefix = f"ma{os.getpid()}"[-8:]
        with namespaces(prefix):
            program = [sys.executable, "-m", "tests.hosts.two_hosts", body.__module__, body.__name__, loop, prefix, str(tmp_path)]
            done = subprocess.run(
                ["ip", "netns", "exec", f"{prefix}c", *program], cwd=ROOT, capture_output=True, text=True, timeout=100, env=ENVIRONMENT
            )
        if done.returncode:
            pytest.fail(f"the client exited with {done.returncode} and wrote:\n{done.stdout}{done.stderr}", pytrace=False)

    test.__doc__, test.__name__ = body.__doc__, body.__name__
    test.body = body  # type: ignore[attr-defined]
    return test


def main(module: str, name: str, loop: str, prefix: str, folder: str) -> None:
    """What the process in the client's namespace runs."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    body: Body = getattr(importlib.import_module(module), name).body
    key_file = make_key(Path(folder))
    worker = subprocess.Popen(
        ["ip", "netns", "exec", f"{prefix}w", *command("worker", "--listen", f"tcp://{WORKER}:0", "--key-file", key_file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        net = Net(prefix, worker, key_file)

        async def run() -> None:
            async with asyncio.timeout(80):
                await body(net)
            await monarch_async.shutdown()
            await net.wait_no_procs(3.0)

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())
        assert worker.poll() is None
    finally:
        worker.terminate()
        assert worker.wait(10) == 0
        assert worker.stdout is not None
        worker.stdout.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
