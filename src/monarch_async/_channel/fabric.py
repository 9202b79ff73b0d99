"""UCX: whatever network there is, InfiniBand, RoCE, TCP, by the package ``ucxx`` (the extra ``ucx``), imported when first used.

What this uses of it is tagged send and receive, since its Python interface has no one-sided operations; large ones are moved without a copy
where the hardware can. A thread of UCX's makes progress, so the event loop is not needed for that. The environment variables of UCX, as
``UCX_TLS``, choose the transports.

UCX knows no key of the job's: what travels over it is neither authenticated nor encrypted. The tags are, as they come by messages.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

__all__ = ["Fabric", "finished"]

PATIENCE = 1_000_000_000
"""Nanoseconds that closing an endpoint may take."""
GRACE = 1.0
"""Seconds that a request which nobody wants any more may take to its end."""
EAGER_LOOKS = 20
LOOK_EVERY = 0.001


class Fabric:
    """This process's end. Raises `ImportError` where ``ucxx`` is missing; its functions raise UCX's own errors, which are `Exception`s."""

    def __init__(self) -> None:
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self._ucx: Any = ucx
        self._array: Any = Array
        self._context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker: Any = ucx.UCXWorker(self._context)
        self._worker.start_progress_thread(polling_mode=False, epoll_timeout=1)
        self._endpoints: dict[bytes, Any] = {}
        self.address = bytes(ucx.UCXAddress.create_from_worker(self._worker).tobytes())

    def send(self, peer: bytes, tag: int, view: memoryview) -> Any:
        """Begin to send to a peer's address."""
        return self._endpoint(peer).tag_send(self._array(view), self._ucx.UCXXTag(tag))

    def receive(self, peer: bytes, tag: int, view: memoryview) -> Any:
        """Begin to receive what the peer sends with this tag."""
        return self._endpoint(peer).tag_recv(self._array(view), self._ucx.UCXXTag(tag))

    def _endpoint(self, peer: bytes) -> Any:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not endpoint.alive:
            address = self._ucx.UCXAddress.create_from_buffer(peer)
            endpoint = self._endpoints[peer] = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        return endpoint

    def forget(self, peer: bytes) -> None:
        """A peer is gone: what is under way to and from it fails."""
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            endpoint.close_blocking(PATIENCE, 1)

    def close(self) -> None:
        """Let everything go."""
        for peer in list(self._endpoints):
            self.forget(peer)
        self._worker.stop_progress_thread()


async def finished(request: Any, abandon: Callable[[], None]) -> None:
    """Until a request has ended; raises what it ended with.

    Cancelled, it waits for that all the same, since UCX still has the memory; after `GRACE` seconds it calls `abandon`, which is to end it.
    """
    loop = asyncio.get_running_loop()
    looks = 0
    abandon_at = math.inf
    cancelled = False
    while not request.completed:
        looks += 1
        if loop.time() > abandon_at:
            abandon_at = math.inf
            abandon()
        try:
            await asyncio.sleep(0 if looks < EAGER_LOOKS else LOOK_EVERY)
        except asyncio.CancelledError:
            cancelled, abandon_at = True, loop.time() + GRACE
    if cancelled:
        raise asyncio.CancelledError
    request.check_error()
