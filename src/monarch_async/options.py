"""Settings: one frozen, validated record, given to a runtime when it starts and handed to all its processes.

Every bound of the system is here under the name that its error message uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

__all__ = ["RDMA_BACKENDS", "Options"]

MiB = 1 << 20
RDMA_BACKENDS = ("auto", "local", "cma", "segment", "ucx", "tcp")
"""Ways to copy to and from an `RDMABuffer`, in the order in which they are tried; ``auto``: the first that can."""


class _Settings(NamedTuple):
    mailbox_messages: int = 100_000
    """Messages one process may have under way to one actor before an un-awaited send raises `ChannelFull`."""
    mailbox_bytes: int = 1024 * MiB
    """The same in bytes of arguments. One message larger than this passes when nothing else is under way."""
    link_bytes: int = 1024 * MiB
    """Bytes that may wait to leave for one process before a further large message raises `ChannelFull`."""
    segment_bytes: int = 16 * 1024 * MiB
    """Shared memory that one process may have for what it sends to others of its host; in any case no more than half of the machine's. What
    finds no room takes the socket."""
    max_frame: int = 8 * 1024 * MiB
    """The largest message, arguments and buffers together."""
    handshake_bytes: int = 4096
    handshake_timeout: float = 5.0
    lease: float = 10.0
    """How long a host or link may be silent or cut before what depends on it is given up."""
    heartbeat: float = 1.0
    """How often links between hosts are probed."""
    start_timeout: float = 60.0
    """How long a process may take from request to answering."""
    cleanup_timeout: float = 3.0
    """How long `__cleanup__` may take."""
    stop_timeout: float = 5.0
    """How long a process may take from the request to stop until it is killed."""
    unknown_grace: float = 5.0
    """How long a message for an actor that is not known (yet) is kept."""
    log_bytes: int = 16 * MiB
    """How much of each rank's output is kept in full."""
    forward_output: bool = True
    """Whether output of processes is shown at the client."""
    fold_window: float = 0.1
    """How long to wait for further ranks to print the same line."""
    fan_out: int = 16
    """To more members of a mesh than this, one message goes to the agent of each other host, which sends it on to those there."""
    fan_out_local: bool = False
    """Whether that holds for members on the sender's own host too. It saves no network there and costs a hop: with 32 members on two cores
    an empty call takes 2.0 ms in place of 1.4, one with 1 MiB 46 ms in place of 29; but the sender is held up for 0.4 ms, not 10."""
    stuck_after: float = 0.5
    """How long an event loop may not come round until its process is called stuck. That is a state to ask for and nothing else happens: a
    training step that blocks the loop (``loss.item()``, a plain loop over batches in an ``async`` endpoint) is stuck in this sense while it
    runs, and calls to that process wait for its end. A ``def`` endpoint blocks no loop, unless it is C code that holds the interpreter's
    lock. Not below 0.2 in effect."""
    stuck_warn: float = 30.0
    """How long a process may be stuck until the client logs a warning with the endpoint and the stack, once for each time."""
    stuck_kill_after: float = 60.0
    """How long a process that was started with ``stuck="kill"`` may be stuck until it is killed."""
    health_timeout: float = 2.0
    """How long to wait for a host's answer about the health of its processes until they are called unreachable."""
    checkpoint_bytes: int = 4096 * MiB
    """How large one checkpoint of one actor may be; the last of each is kept by its owner's process."""
    rdma_backend: str = "auto"
    """How `RDMABuffer` copies, of `RDMA_BACKENDS`. One that is named is used, or fails where it can't be."""
    dead_letters: int = 1000
    """How many undeliverable messages are remembered."""
    debug: bool = False
    """Whether ``async`` handlers can stop at a ``breakpoint()``: each actor's code on the loop then runs in a thread of its own, in turn
    with the loop (docs/repl.md). The environment variable ``MONARCH_ASYNC_DEBUG=1`` is the same; at a prompt it is on."""
    job_name: str = ""
    """What the job is called where jobs are listed; by default after the program."""


class Options(_Settings):
    """Bounds in messages and bytes, times in seconds.

    Raises `ValueError` when a figure is not positive or a backend is none, and `TypeError` for an unknown name.
    """

    __slots__ = ()

    def __new__(cls, **settings: Any) -> Self:
        for name in settings:
            if name not in cls._fields:
                raise TypeError(f"unknown option {name!r}; known are {', '.join(sorted(cls._fields))}")
        if (backend := settings.get("rdma_backend", "auto")) not in RDMA_BACKENDS:
            raise ValueError(f"option 'rdma_backend' must be one of {', '.join(RDMA_BACKENDS)}, not {backend!r}")
        for name, value in settings.items():
            if not isinstance(value, bool | str) and value <= 0:
                raise ValueError(f"option {name!r} must be positive, got {value!r}")
        return super().__new__(cls, **settings)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def with_(self, **changes: Any) -> Options:
        """A copy with some settings changed."""
        return Options(**{**self._asdict(), **changes})
