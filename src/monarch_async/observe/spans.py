"""Handlers as spans of OpenTelemetry, with the option `spans`, where ``opentelemetry-api`` is installed.

    configure(spans=True)  # or MONARCH_ASYNC_SPANS=1
    procs = this_host().spawn_procs({"gpus": 8}, bootstrap=set_up_my_tracer_provider)

Theory: a call carries the context of the span that is current where it is made, as W3C's ``traceparent``, in its extras (``t``, and ``s``
for the ``tracestate``). The handler is a span below that one; the handler of a broadcast, which nobody waits for, begins a trace of its own
with a link to it. Within a handler its span is the current one, so that what it does and calls goes below it.

Rules:

* A process that has no tracer provider makes no spans, and hands the context on to what its handlers call.
* Calls carry the context when the runtime was started with the option; there is no branch for it elsewhere: endpoints are of another class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_async._core.codec import Buffers
from monarch_async._runtime.context import Message, current_message
from monarch_async._runtime.runtime import Runtime
from monarch_async.errors import UsageError
from monarch_async.observe.inside.layers import Function, layers_of
from monarch_async.sending import MeshEndpoint
from monarch_async.sent import Sent

try:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HERE = False
else:
    HERE = True

__all__ = ["TracedEndpoint", "begin"]

_PARENT, _STATE = "t", "s"
_NAMES = {_PARENT: "traceparent", _STATE: "tracestate"}


class TracedEndpoint(MeshEndpoint):
    """Its calls carry the current span's context."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plain = False

    def _extras(self, handler: Message | None, request: int) -> dict[str, Any] | None:
        return {**(super()._extras(handler, request) or {}), **_carried()} or None

    def _cast(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sent: Sent,
        pickled: tuple[bytes, Buffers] | None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        # Of another thread this is called by the loop, with that thread's context.
        super()._cast(args, kwargs, sent, pickled, {**(extras or {}), **_carried()} or None)


class _Spans:
    """The layer."""

    def around_async(self, actor: str, endpoint: str, function: Callable[..., Awaitable[Any]]) -> Function:
        async def traced(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            with _span(actor, endpoint):
                return await function(instance, *args, **kwargs)

        return traced

    def around_sync(self, actor: str, endpoint: str, function: Function) -> Function:
        def traced(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            with _span(actor, endpoint):
                return function(instance, *args, **kwargs)

        return traced


def _carried() -> dict[str, str]:
    """What a message carries of the current span's context; nothing if there is none."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {short: carrier[name] for short, name in _NAMES.items() if name in carrier}


@contextmanager
def _span(actor: str, endpoint: str) -> Iterator[None]:
    """Around a handler."""
    message = current_message.get()
    caller = _context_of(message)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # none was set
        token = context.attach(caller)
        try:
            yield
        finally:
            context.detach(token)
        return
    identity = message.cell.identity if message is not None else None
    attributes: dict[str, str | int] = {"rpc.system": "monarch_async", "rpc.service": actor, "rpc.method": endpoint}
    if identity is not None:
        attributes |= {"monarch_async.actor": str(identity), "monarch_async.rank": identity.rank}
    nests = message is None or bool(message.request)
    link = trace.get_current_span(caller).get_span_context()
    with trace.get_tracer("monarch_async").start_as_current_span(
        f"{actor}.{endpoint}",
        context=caller if nests else context.Context(),
        kind=trace.SpanKind.SERVER if nests else trace.SpanKind.CONSUMER,
        links=[trace.Link(link)] if not nests and link.is_valid else None,
        attributes=attributes,
    ):
        yield


def _context_of(message: Message | None) -> context.Context:
    """The caller's; an empty one where it has sent none, or something else."""
    extras = (message.extras if message is not None else None) or {}
    carrier = {name: str(extras[short]) for short, name in _NAMES.items() if short in extras}
    return TraceContextTextMapPropagator().extract(carrier, context=context.Context())


def begin(runtime: Runtime) -> None:
    """The option says so: from now on. Raises `UsageError` where ``opentelemetry-api`` is missing, in the program itself."""
    if not HERE:
        if runtime.me.name == "client":
            raise UsageError("the option spans needs opentelemetry-api: pip install 'monarch-async[traces]'")
        return
    runtime.parts["endpoint class"] = TracedEndpoint
    layers_of(runtime).add(_Spans())
