"""The page ``/metrics`` of a program: all of its job, asked for when it is asked.

    async with serve_metrics(9464) as served:
        print(served.url)

Rules:

* It listens on this machine only, unless another host is named, and gives nothing to who has not got its token: ``Authorization: Bearer``.
* The token is kept in a file of this user's (mode 0600), so that it is the same for all jobs and can be named in a scraper's configuration.
* An answer takes no longer than the processes may: see `collecting`. It is made in the event loop of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from monarch_async._runtime.jobfile import state_folder
from monarch_async._runtime.runtime import Runtime
from monarch_async.ambient import current_runtime
from monarch_async.errors import UsageError
from monarch_async.observe.metrics.collecting import Collector
from monarch_async.observe.metrics.rendering import CONTENT_TYPE, render
from monarch_async.options import parse_address

__all__ = ["Served", "serve_by_option", "serve_metrics", "token_file"]

SHORTEST = 16
"""Characters of a token."""


class Served(NamedTuple):
    """Where metrics are served, and the token that is to be sent along."""

    url: str
    port: int
    token: str


@contextlib.asynccontextmanager
async def serve_metrics(
    port: int = 0, *, host: str = "127.0.0.1", token: str | None = None, patience: float = 1.0
) -> AsyncIterator[Served]:
    """Serve the metrics of this program's job until the end of the ``async with``.

    Args:
        port: 0 is a free one.
        host: an address of this machine to listen on.
        token: what who asks has to send; by default that of `token_file`. ``""``: nothing, on a loopback address only.
        patience: seconds in which each process is to answer.

    Raises `UsageError` without aiohttp, for a token that is too short, for none beyond loopback; `OSError` for a port in use, or a
    token that can't be kept.
    """
    async with _serve(current_runtime(), port, host, token, patience) as served:
        yield served


@contextlib.asynccontextmanager
async def _serve(runtime: Runtime, port: int, host: str, token: str | None, patience: float) -> AsyncIterator[Served]:
    web = _aiohttp_web()
    token = _kept_token() if token is None else token
    _check(host, token)
    collector = Collector(runtime, patience)
    wanted = f"Bearer {token}".encode()

    async def answer(request: Any) -> Any:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if token and not hmac.compare_digest(given, wanted):
            return web.Response(status=401, text="send the token: Authorization: Bearer TOKEN\n", headers={"WWW-Authenticate": "Bearer"})
        return web.Response(body=render(await collector.collect()).encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=patience)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        yield Served(f"http://{shown}:{bound}/metrics", bound, token)
    finally:
        await runner.cleanup()
        await collector.close()
        if not runtime.closing and runtime.stopping is None:
            await collector.end()


def _aiohttp_web() -> Any:
    try:
        from aiohttp import web
    except ImportError:
        raise UsageError("to serve metrics needs aiohttp: pip install 'monarch-async[observe]'") from None
    return web


def _check(host: str, token: str) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not token and not loopback:
        raise UsageError(f"metrics are not served on {host} without a token: everybody could read them")
    if token and (len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token):
        raise UsageError(f"a token is at least {SHORTEST} printable characters of ASCII without spaces")


def token_file() -> str:
    """Where the token is that is used by default. Raises `OSError` for a user without a home."""
    return os.path.join(state_folder(), "metrics.token")


def _kept_token() -> str:
    """What stands in it; made when it is first wanted."""
    path = token_file()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    if not os.path.exists(path):
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as new:
            new.write(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # another program was first
            os.link(draft, path)
        os.unlink(draft)
    with open(path, encoding="ascii") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(f"{path} can be read by others, so its token is worth nothing: chmod 600 it, if it is yours")
        return file.read(1024).strip()


def serve_by_option(runtime: Runtime) -> asyncio.Task[None]:
    """Serve until the job ends, as the option `metrics` says. What goes wrong is logged, and the job goes on."""
    return runtime.tasks.start(_serve_until_end(runtime), name="serving metrics")


async def _serve_until_end(runtime: Runtime) -> None:
    host, port = parse_address(runtime.options.metrics)
    try:
        async with _serve(runtime, port, host, None, 1.0) as served:
            runtime.parts["metrics served"] = served
            runtime.log.info("metrics are served at %s, with the token in %s", served.url, token_file())
            await runtime.loop.create_future()
    except (OSError, UsageError) as error:
        runtime.log.warning("metrics are not served: %s", error)
