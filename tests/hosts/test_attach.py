"""Attaching to workers: what holds, and what each thing that can be wrong is called."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_async import (
    TLS,
    Actor,
    ActorDied,
    AddressError,
    AuthenticationError,
    HostMesh,
    SpawnError,
    UsageError,
    VersionMismatch,
    attach_to_workers,
    endpoint,
    shutdown,
    this_host,
)
from monarch_async._channel.dial import read_route
from monarch_async._core.handshake import NONCE_BYTES, Handshake
from monarch_async.ambient import current_runtime
from tests.hosts.workers import make_key, worker
from tests.runtime.agents import wait_gone


class Named(Actor):
    """Says who it is, and asks another."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def pid_of(self, other: Any) -> int:
        pid: int = await other.pid.call_one()
        return pid

    @endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(60)

    @endpoint
    async def say(self, text: str) -> None:
        print(text)  # noqa: T201 - its output is what the test is about


async def test_two_workers_are_a_mesh_in_the_order_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Dimension `hosts`, ranks in order; processes of both, and of this host, reach each other; output comes here; shutdown ends all."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (one, first), worker("--key-file", key) as (two, second):
        local = this_host().spawn_procs().spawn("local", Named)
        await local
        hosts = attach_to_workers([one, two], key=key)
        assert {"hosts": 2} == dict(hosts.extent)
        assert hosts is await hosts
        there = hosts.spawn_procs({"gpus": 2}).spawn("there", Named)
        pids = [pid for _, pid in (await there.pid.call()).items()]
        parents = [_worker_of(pid) for pid in pids]
        assert [first.pid, first.pid, second.pid, second.pid] == parents
        assert pids[3] == await there.slice(hosts=0, gpus=0).pid_of.call_one(there.slice(hosts=1, gpus=1))
        assert pids[0] == await local.pid_of.call_one(there.slice(hosts=0, gpus=0))
        assert await local.pid.call_one() == await there.slice(hosts=1, gpus=0).pid_of.call_one(local)
        only = hosts.slice(hosts=1).spawn_procs().spawn("only", Named)
        assert second.pid == _worker_of(await only.pid.call_one())
        await there.say.call("from afar")
        await shutdown()
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert "from afar" in capfd.readouterr().out


def _worker_of(pid: int) -> int:
    """The worker that a proc is below of: proc, zygote, root zygote, agent, worker."""
    for _ in range(4):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


async def test_a_second_attach_joins_the_same_job(tmp_path: Path) -> None:
    """Hosts attached later are reached by what runs already; another key is refused at the call."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (one, _), worker("--key-file", key) as (two, _):
        first = attach_to_workers([one], key=key).spawn_procs().spawn("first", Named)
        await first
        second = attach_to_workers([two], key=Path(key)).spawn_procs().spawn("second", Named)
        assert await second.slice(hosts=0).pid.call_one() == await first.slice(hosts=0).pid_of.call_one(second.slice(hosts=0))
        with pytest.raises(UsageError, match="one"):
            attach_to_workers([two], key=os.urandom(32))
        await shutdown()


async def test_wrong_key(tmp_path: Path) -> None:
    """`AuthenticationError` that names the worker, at once; the same from a mesh of processes that was asked for meanwhile."""
    with worker("--key-file", make_key(tmp_path)) as (url, _):
        start = time.monotonic()
        hosts = attach_to_workers([url], key=os.urandom(32))
        procs = hosts.spawn_procs()
        with pytest.raises(AuthenticationError, match=url.removeprefix("tcp://")):
            await hosts
        with pytest.raises(AuthenticationError):
            await procs
        await shutdown()
        assert time.monotonic() - start < 3


async def test_no_worker_there() -> None:
    """A port that nobody listens on: `AddressError` with what was tried."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(AddressError, match=rf"127\.0\.0\.1:{port}: Connection refused"):
        await attach_to_workers([f"tcp://127.0.0.1:{port}"], key=os.urandom(32))


async def test_a_name_that_does_not_resolve() -> None:
    """`AddressError` that names it."""
    with pytest.raises(AddressError, match=r"nowhere\.invalid"):
        await attach_to_workers(["tcp://nowhere.invalid:1234"], key=os.urandom(32))


async def _fake_worker(serve: Callable[[socket.socket], Any]) -> tuple[str, asyncio.Task[None]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)

    async def run() -> None:
        with listener:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setblocking(False)
            with sock:
                await serve(sock)

    return f"tcp://127.0.0.1:{listener.getsockname()[1]}", asyncio.ensure_future(run())


async def test_another_version() -> None:
    """A worker of another version: `VersionMismatch` that says what to do."""
    key = os.urandom(32)
    loop = asyncio.get_running_loop()

    async def serve(sock: socket.socket) -> None:
        await read_route(sock)
        await loop.sock_sendall(sock, b"+")
        handshake = Handshake.accept(key, {}, os.urandom(NONCE_BYTES), loop.time(), lambda hello: {}, version=999)
        try:
            handshake.receive(await loop.sock_recv(sock, 4096), loop.time())
        except VersionMismatch:
            await loop.sock_sendall(sock, handshake.refusal)

    url, serving = await _fake_worker(serve)
    with pytest.raises(VersionMismatch, match="same release"):
        await attach_to_workers([url], key=key)
    await serving


async def test_something_else_listens_there() -> None:
    """Whatever it says, a typed error names the address."""
    loop = asyncio.get_running_loop()

    async def serve(sock: socket.socket) -> None:
        await loop.sock_recv(sock, 4096)
        await loop.sock_sendall(sock, b"HTTP/1.1 400 Bad Request\r\n\r\n")

    url, serving = await _fake_worker(serve)
    with pytest.raises(AddressError, match=url.removeprefix("tcp://")):
        await attach_to_workers([url], key=os.urandom(32))
    await serving


@pytest.mark.parametrize(
    ("workers", "key", "error"),
    [
        ([], b"k" * 32, UsageError),
        (["tcp://127.0.0.1:0"], b"k" * 32, UsageError),
        (["127.0.0.1"], b"k" * 32, AddressError),
        (["tcp://a:1", "tcp://a:1"], b"k" * 32, UsageError),
        (["tcp://127.0.0.1:1"], b"short", UsageError),
        (["tcp://127.0.0.1:1"], "/nowhere/key", UsageError),
        ("tcp://127.0.0.1:1", b"k" * 32, TypeError),
    ],
)
def test_bad_arguments(workers: Any, key: Any, error: type[Exception]) -> None:
    """Refused at the call, before anything is started."""
    with pytest.raises(error):
        attach_to_workers(workers, key=key)


async def test_a_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of a worker ends its agents and procs; pending calls fail, and soon."""
    monkeypatch.setattr("monarch_async.unhandled_fault_hook", lambda failure: None)
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, process):
        there = attach_to_workers([url], key=key).spawn_procs().spawn("there", Named)
        pid = await there.slice(hosts=0).pid.call_one()
        pending = there.slice(hosts=0).sleep.call_one()
        process.kill()
        start = time.monotonic()
        with pytest.raises(ActorDied):
            await pending
        await wait_gone([pid], 2.5 - (time.monotonic() - start))


async def test_the_users_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback neither side needs a key: the user's own is made, for nobody else to read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with worker(env={"XDG_CONFIG_HOME": str(tmp_path)}) as (url, _):
        await attach_to_workers([url])
        await shutdown()
    assert 0o600 == (tmp_path / "monarch-async" / "key").stat().st_mode & 0o777


def _certificates(folder: Path) -> TLS:
    """One authority, and one certificate of it for loopback."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    openssl(*new, "/CN=authority", "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-addext", "keyUsage=critical,keyCertSign")
    openssl(*new, "/CN=host", "-keyout", "host.key", "-out", "host.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "host.csr", *signed, "-out", "host.pem")
    return TLS(*(str(folder / name) for name in ("host.pem", "host.key", "ca.pem")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="making certificates needs openssl")
async def test_tls(tmp_path: Path) -> None:
    """With certificates all links between hosts are encrypted; a side without them is told, and so is one with a stranger's."""
    tls = _certificates(tmp_path)
    key = make_key(tmp_path)
    with worker("--key-file", key, "--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca) as (url, _):
        local = this_host().spawn_procs().spawn("local", Named)
        there = attach_to_workers([url], key=key, tls=tls).spawn_procs().spawn("there", Named)
        pid = await there.slice(hosts=0).pid.call_one()
        assert pid == await local.pid_of.call_one(there.slice(hosts=0))
        assert await local.pid.call_one() == await there.slice(hosts=0).pid_of.call_one(local)
        await shutdown()
        with pytest.raises(ConnectionError):
            await attach_to_workers([url], key=key)
        await shutdown()
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(ConnectionError):
            await attach_to_workers([url], key=key, tls=_certificates(other))
        await shutdown()


async def test_tls_files_that_are_none(tmp_path: Path) -> None:
    """Files that can't be used are told when the mesh is awaited."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (url, _):
        with pytest.raises(UsageError, match="can't be used"):
            await attach_to_workers([url], key=key, tls=TLS("/nowhere/c", "/nowhere/k", "/nowhere/a"))
        await shutdown()


async def test_processes_that_actors_on_a_worker_spawn(tmp_path: Path) -> None:
    """On their own host, on another worker's and on this one; they end with what has spawned them."""
    key = make_key(tmp_path)
    with worker("--key-file", key) as (one, first), worker("--key-file", key) as (two, second):
        hosts = attach_to_workers([one, two], key=key)
        procs = hosts.slice(hosts=0).spawn_procs()
        spawner = procs.spawn("spawner", Spawner)
        pids = await spawner.spawn_on.call_one([None, hosts.slice(hosts=1), this_host()])
        assert [first.pid, second.pid, os.getpid()] == [_worker_of(pids[0]), _worker_of(pids[1]), _worker_of(pids[2])]
        await procs.stop()
        await wait_gone(pids)
        await shutdown()


async def test_the_end_of_the_job_while_workers_are_attached_to(tmp_path: Path) -> None:
    """Who waits for the hosts is told; nobody waits for ever."""
    with worker("--key-file", key := make_key(tmp_path)) as (url, _):
        hosts = attach_to_workers([url], key=key)
        waiting = asyncio.ensure_future(_wait_for(hosts))
        await asyncio.sleep(0)
        await shutdown()
        with pytest.raises(SpawnError, match="has ended"):
            await waiting


async def _wait_for(hosts: HostMesh) -> None:
    await hosts


class Spawner(Actor):
    """Spawns processes elsewhere."""

    @endpoint
    async def spawn_on(self, hosts: list[HostMesh | None]) -> list[int]:
        meshes = [(host or this_host()).spawn_procs().spawn("below", Named) for host in hosts]
        return [await mesh.pid.call_one() for mesh in meshes]


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


async def _knock(address: str, data: bytes) -> bytes:
    """What a stranger hears who connects, says that and waits for the end."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    loop = asyncio.get_running_loop()
    heard = b""
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, data)
        try:
            async with asyncio.timeout(8):
                while piece := await loop.sock_recv(sock, 4096):
                    heard += piece
        except ConnectionResetError:
            pass
    return heard


async def test_a_stranger_with_a_pickle(tmp_path: Path) -> None:
    """To the worker, to an agent on its host, to a process there and to this program: closed, and nothing is unpickled. All go on."""
    key = make_key(tmp_path)
    path = tmp_path / "made by a stranger"
    bomb = pickle.dumps(_Touch(path))
    with worker("--key-file", key) as (url, _):
        hosts = attach_to_workers([url], key=key)
        procs = hosts.spawn_procs()
        there = procs.spawn("there", Named)
        await there
        client = current_runtime().me
        process = procs._addresses[0]
        for address, target in (
            (url, "worker"),
            (url, f"{process.host}/{process.host}"),
            (url, f"{process.host}/{process.uid}"),
            (client.tcp, f"{client.host}/{client.uid}"),
            (client.tcp, f"{client.host}/{client.host}"),
        ):
            prelude = b"MAR1" + bytes((len(target),)) + target.encode()
            heard = await _knock(address, prelude + bomb)
            assert heard.startswith(b"+")  # it got to whom it wanted, and no further
            await _knock(address, bomb)
        assert not path.exists()
        assert 0 < await there.slice(hosts=0).pid.call_one()
        await shutdown()
