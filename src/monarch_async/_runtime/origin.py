"""Where answers go: back over a link, or to a waiter in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch_async._core.codec import copy_value, dumps, is_plain, loads
from monarch_async._core.events import Evidence
from monarch_async._core.faults import decode_fault, encode_fault
from monarch_async._core.framing import CLOSED, CREDIT, FAIL, REPLY, STARTED, pack_message
from monarch_async._runtime.context import Account, Message, Origin, Waiter
from monarch_async._runtime.link import INLINE, Link
from monarch_async.errors import ProtocolError

__all__ = ["LinkOrigin", "LocalOrigin", "PortSink", "read_fault", "take_port_message"]

PortSink = Callable[[Origin, int, Any, BaseException | None, int], None]
"""Takes what arrives at a port: from where, rank of the sender, value or error, and the bytes to give credit for."""


class LinkOrigin:
    """The far end of a link."""

    __slots__ = ("link",)

    def __init__(self, link: Link) -> None:
        self.link = link

    def answer(self, message: Message, value: Any) -> None:
        link = self.link
        link.inbound_calls.pop(message.request, None)
        if value is None:
            link.send_control(pack_message((REPLY, message.request, b"")))
            return
        try:
            body, buffers = dumps(value)
            if buffers or len(body) > INLINE:
                link.send_large([REPLY, message.request, b""], body, buffers)
            else:
                link.send_control(pack_message((REPLY, message.request, body)))
        except Exception as error:  # pickling runs the code of what is pickled, which may fail in any way
            if message.cell is not None:
                error.add_note(f"this was the result of {message.cell.identity}.{message.endpoint}")
            self.refuse(message, error)

    def refuse(self, message: Message, error: BaseException) -> None:
        self.link.inbound_calls.pop(message.request, None)
        if message.request:
            actor = str(message.cell.identity) if message.cell is not None else ""
            self.link.send_control(pack_message((FAIL, message.request, encode_fault(error, actor=actor))))

    def credit(self, key: int, messages: int, size: int) -> None:
        self.link.send_control(pack_message((CREDIT, key, messages, size)))

    def tell_started(self, message: Message) -> None:
        self.link.send_control(pack_message((STARTED, message.request)))


class LocalOrigin:
    """This process. Values are copied on the way unless they are immutable."""

    __slots__ = ("_calls", "_find_lane")

    def __init__(self, calls: dict[int, Message], find_lane: Callable[[int], Account | None]) -> None:
        self._calls = calls  # those under way, by request
        self._find_lane = find_lane

    def answer(self, message: Message, value: Any) -> None:
        waiter = self._close(message)
        if waiter is not None:
            if not is_plain(value):
                try:
                    value = copy_value(value)
                except Exception as error:  # copying runs the code of what is copied, which may fail in any way
                    waiter.fail(message.request, error)
                    return
            waiter.settle(message.request, value)

    def refuse(self, message: Message, error: BaseException) -> None:
        waiter = self._close(message)
        if waiter is not None:
            # As if it had travelled: the caller of a local actor sees the same as that of a remote one.
            actor = str(message.cell.identity) if message.cell is not None else ""
            waiter.fail(message.request, decode_fault(encode_fault(error, actor=actor)))

    def _close(self, message: Message) -> Waiter | None:
        message.lane.credit(1, 0)
        waiter, message.waiter = message.waiter, None
        self._calls.pop(message.request, None)
        return waiter

    def credit(self, key: int, messages: int, size: int) -> None:
        lane = self._find_lane(key)
        if lane is not None:
            lane.credit(messages, 0)

    def tell_started(self, message: Message) -> None:
        """Nothing to tell: caller and handler die together."""


def read_fault(data: bytes) -> Exception:
    """The error that came as an answer; or, if it can't be read, the one that says so."""
    try:
        return decode_fault(data)
    except ProtocolError as error:
        return error


class Ports(Protocol):
    """What takes messages to ports needs of its runtime."""

    ports: dict[int, PortSink]

    def dead_letter(self, actor: object, endpoint: str, evidence: Evidence) -> None: ...


def take_port_message(runtime: Ports, link: Link, origin: LinkOrigin, fields: list[Any], buffers: list[memoryview] | None) -> None:
    """Something was sent to a port of this process."""
    _, port, rank, body, fault = fields
    receive = runtime.ports.get(port)
    if receive is None:
        runtime.dead_letter(f"port {port:#x}", "send", Evidence("the port is closed"))
        link.send_control(pack_message((CLOSED, port)))
        return
    size = len(body) + sum(view.nbytes for view in buffers or ())
    value: Any = None
    error: BaseException | None = None
    try:
        if fault is not None:
            error = read_fault(fault)
        elif body:
            value = loads(body, buffers or ())
    except Exception as raised:  # whatever a value's own unpickling raises belongs to who receives it
        error = raised
    receive(origin, rank, value, error, size)
