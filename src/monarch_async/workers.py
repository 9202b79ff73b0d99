"""Other hosts: workers that wait there for jobs, and how a program gets at them.

On each host: ``monarch-async worker --listen tcp://HOST:PORT --key-file F``, or `run_worker_loop_forever`. In the program::

    hosts = attach_to_workers(["tcp://node1:26600", "tcp://node2:26600"], key="job.key")
    procs = hosts.spawn_procs(per_host={"gpus": 8})

Whoever holds the key of a worker may run anything there, as the user that the worker runs as. The same key secures all links between the
hosts of the job, so its workers share one. Without `TLS` what passes between hosts is authenticated but can be read on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence

from monarch_async._channel.dial import parse_tcp
from monarch_async._channel.keys import generate_key, read_key, write_key
from monarch_async._channel.tls import TLS
from monarch_async._core.handshake import KEY_BYTES
from monarch_async._runtime.config import Network
from monarch_async._runtime.worker import Worker
from monarch_async.ambient import client_of, current_runtime, on_loop
from monarch_async.errors import UsageError
from monarch_async.host import HostMesh
from monarch_async.shape import Shape

__all__ = ["TLS", "attach_to_workers", "run_worker_loop_forever"]

Key = bytes | str | os.PathLike[str] | None


def attach_to_workers(workers: Sequence[str], *, key: Key = None, tls: TLS | None = None, advertise: str = "") -> HostMesh:
    """The hosts on which workers listen, as a mesh with the dimension ``hosts``, in the order given; returns at once.

    Args:
        workers: their addresses, ``"tcp://HOST:PORT"``. All hosts of the job use these, so give names that all of them can resolve.
        key: the workers' key: the path of a file, or at least 32 bytes. `None`: this user's own key, which a worker on loopback uses too.
        tls: the files of this host for TLS, if the workers use it.
        advertise: the ``HOST`` or ``HOST:PORT`` by which the workers reach this host; else the address from which it reaches them.

    Await the mesh to see whether all could be attached: it raises `AddressError` for a worker that can't be reached within 3 heartbeats,
    `AuthenticationError` for one that has another key, `VersionMismatch` for one of another version, each naming it. Raises `UsageError`
    for no worker, a key that is none, a second key in one job, or in a process that is not the program itself; `AddressError` for what is
    no address.
    """
    if isinstance(workers, str):
        raise TypeError(f"workers is a sequence of addresses: [{workers!r}]")
    if not workers:
        raise UsageError("give the address of one worker at least, as tcp://HOST:PORT")
    for worker in workers:
        if parse_tcp(worker)[1] == 0:
            raise UsageError(f"{worker}: give the port that the worker says it listens on")
    if len(set(workers)) != len(workers):
        raise UsageError("a worker is named twice: start a second mesh of processes on it instead")
    network = Network(_key(key), tls)
    runtime = current_runtime()
    client = client_of(runtime)
    if client is None:
        raise UsageError("only the program itself can attach to workers: do it there, and send the mesh of hosts")
    agents = on_loop(runtime, lambda: client.attach(workers, network, advertise))
    return HostMesh(runtime, agents, Shape.of(hosts=len(agents)))


def run_worker_loop_forever(
    address: str,
    key_file: str | os.PathLike[str] | None = None,
    *,
    advertise: str = "",
    tls: TLS | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Be a worker until SIGTERM or SIGINT, then end what runs here for jobs and return. `announce` is called with a line once it listens.

    `address` is ``"tcp://HOST:PORT"``; HOST ``0.0.0.0`` or ``*`` stands for all interfaces, port 0 for a free one. Raises `UsageError`
    for a missing or unusable key, `AddressError` for an address that can't be had or that others could not use.
    """
    host, port = parse_tcp(address)
    if key_file is None and not _is_loopback(host):
        raise UsageError(f"{address} can be reached from other hosts: give a key file, which all hosts of the job share (--key-file)")
    network = Network(_key(key_file), tls)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Worker(host, port, network, advertise), announce))


async def _serve(worker: Worker, announce: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    worker.start()
    try:
        announce(f"monarch-async worker listens on tcp://{worker.told}")
        await asked.wait()
    finally:
        await worker.stop()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _key(key: Key) -> bytes:
    if isinstance(key, bytes):
        if len(key) < KEY_BYTES:
            raise UsageError(
                f"a key has at least {KEY_BYTES} bytes, this one has {len(key)}; to read it from a file, give its path as a str"
            )
        return key
    return read_key(_own_key() if key is None else key)


def _own_key() -> str:
    """This user's key file, made when it is first needed."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = os.path.join(home, "monarch-async", "key")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            write_key(path, generate_key())
        except UsageError:
            if not os.path.exists(path):  # another process was faster otherwise
                raise
    return path
