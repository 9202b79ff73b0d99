"""What the adverbs are made of, for who needs it bare: a message with a port for its answers, and answers combined as they come.

* `send` sends to all members of a mesh, or to one of them, and has the answers delivered to a port, each with the rank of its sender.
* An `Accumulator` folds the answers of all members into one value, without keeping them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from monarch_async._core.events import Evidence
from monarch_async._runtime.context import Message
from monarch_async._runtime.runtime import Runtime
from monarch_async.endpoints import Endpoint
from monarch_async.errors import MonarchError
from monarch_async.future import Future
from monarch_async.port import Port
from monarch_async.sending import MeshEndpoint
from monarch_async.sent import Sent

__all__ = ["Accumulator", "send"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


def send(
    endpoint: Endpoint[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> Sent:
    """Send a message to every member of the endpoint's mesh, or to one picked at random.

    The answers, values and errors, go to `port`, each with the rank that its sender has in the mesh (see `Channel.open_ranked`); without a
    port none is wanted. Awaiting what this returns waits for room in the mailboxes. Raises as the adverbs do at the call, and `ValueError`
    for another selection.
    """
    if selection not in ("all", "choose"):
        raise ValueError(f'selection is "all" or "choose", not {selection!r}')
    chosen = _of_mesh(endpoint)
    if selection == "choose":
        chosen = chosen.one_of()
    if port is None:
        return chosen.broadcast(*args, **dict(kwargs or {}))
    return chosen.ask(tuple(args), dict(kwargs or {}), _Forwarding(chosen.runtime, port))


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on every member of a mesh and combines the answers in the order in which they come.

    Args:
        endpoint: of a mesh.
        identity: where to begin; `combine` must not change it, since every call begins with it.
        combine: from what there is and one answer to what there is then.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = _of_mesh(endpoint)
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call it; the future has the combined value. The first error, of a member or of `combine`, is the future's."""
        runtime = self._endpoint.runtime
        future: _Accumulation = _Accumulation(loop=runtime.loop)
        future.runtime = runtime
        future.value = self._identity
        future.combine = self._combine
        future.lane = self._endpoint.lanes[0]
        self._endpoint.ask(args, kwargs, future)
        return future


def _of_mesh(endpoint: Any) -> MeshEndpoint:
    if not isinstance(endpoint, MeshEndpoint):
        raise TypeError(f"an endpoint of a mesh is wanted, such as mesh.method, not {endpoint!r}")
    return endpoint


class _Forwarding:
    """Passes answers on to a port."""

    awaited_by: Message | None = None

    def __init__(self, runtime: Runtime, port: Port[Any]) -> None:
        self._runtime = runtime
        self._port = port
        self._ranks: dict[int, int] = {}

    def futures(self) -> Sequence[Any]:
        return ()

    def expect_answers(self, requests: Sequence[int], lanes: Sequence[Any]) -> None:
        self._ranks = {request: rank for rank, request in enumerate(requests)}

    def settle(self, request: int, value: Any) -> None:
        self._pass_on(request, lambda port: port.send(value))

    def fail(self, request: int, error: BaseException) -> None:
        self._pass_on(request, lambda port: port.exception(error))

    def _pass_on(self, request: int, push: Callable[[Port[Any]], Sent]) -> None:
        rank = self._ranks.pop(request, None)
        if rank is None:
            return
        try:
            push(self._port.with_rank(rank))
        except MonarchError as error:  # closed or full: nobody else is there to be told
            self._runtime.dead_letter(self._port, "send", Evidence(str(error)))


class _Accumulation(Future[Any]):
    """The value so far."""

    value: Any
    combine: Callable[[Any, Any], Any]

    def expect_answers(self, requests: Sequence[int], lanes: Sequence[Any]) -> None:
        self._open = dict(zip(requests, lanes, strict=True))

    def settle(self, request: int, value: Any) -> None:
        if self._open.pop(request, None) is None or self.done():
            return
        try:
            self.value = self.combine(self.value, value)
        except Exception as error:  # what the user's function raises is the result
            self._tell_cancelled("cancelled")
            super().fail(request, error)
            return
        if not self._open:
            super().settle(request, self.value)

    def fail(self, request: int, error: BaseException) -> None:
        if self._open.pop(request, None) is not None:
            super().fail(request, error)

    def _tell_cancelled(self, reason: str) -> None:
        for request, lane in list(self._open.items()):
            self.runtime.cancel_request(request, lane, reason)
