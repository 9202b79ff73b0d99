"""Settings: one frozen, validated record, given to a runtime when it starts and handed to all its processes.

Every bound of the system is here under the name that its error message uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

__all__ = ["CUDA_IPC", "RDMA_BACKENDS", "Options", "parse_address"]

MiB = 1 << 20
RDMA_BACKENDS = ("auto", "local", "cma", "segment", "ucx", "tcp")
"""Ways to copy to and from an `RDMABuffer`, in the order in which they are tried; ``auto``: the first that can."""

CUDA_IPC = ("auto", "always", "never")
"""Whether tensors on CUDA devices are lent between processes of one host: where it can be done, or else it is an error, or not at all."""


def parse_address(text: str) -> tuple[str, int]:
    """``"9464"`` → ``("127.0.0.1", 9464)``; ``"HOST:PORT"``; port 0 is a free one. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"option 'metrics' must be a port or HOST:PORT, not {text!r}")
    return host or "127.0.0.1", int(port)


class _Settings(NamedTuple):
    mailbox_messages: int = 100_000
    """Messages one process may have under way to one actor before an un-awaited send raises `ChannelFull`."""
    mailbox_bytes: int = 1024 * MiB
    """The same in bytes of arguments. One message larger than this passes when nothing else is under way, or less than a
    thousandth of it; a call without arguments passes always."""
    link_bytes: int = 1024 * MiB
    """Bytes that may wait to leave for one process before a further large message raises `ChannelFull`."""
    segment_bytes: int = 16 * 1024 * MiB
    """Shared memory that one process may have for what it sends to others of its host; in any case no more than half of the machine's,
    or of what its container may have. What finds no room takes the socket."""
    cuda_ipc: str = "auto"
    """Whether tensors on CUDA devices go to other processes of the host by CUDA IPC, of `CUDA_IPC`. With ``auto`` they go by host memory
    where that can't be; with ``always`` such a message is refused."""
    cuda_ipc_bytes: int = 4096 * MiB
    """Memory on each CUDA device that one process may have for that, beside torch's own; never more than an eighth of the device's."""
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
    metrics: str = ""
    """Where the program serves the job's metrics from its start on: ``"9464"``, a port of 127.0.0.1, or ``"HOST:PORT"``. Empty: nowhere,
    and nothing is counted before somebody asks. Also by ``MONARCH_ASYNC_METRICS``. See docs/metrics.md."""
    spans: bool = False
    """Whether handlers are OpenTelemetry spans, in processes that have a tracer provider. Also by ``MONARCH_ASYNC_SPANS=1``."""
    log_json: bool = False
    """Whether what is logged, and what processes print, is shown as JSON lines. Also by ``MONARCH_ASYNC_LOG_JSON=1``."""


class Options(_Settings):
    """Bounds in messages and bytes, times in seconds.

    Raises `ValueError` when a figure is not positive, a backend is none or an address has no port, and `TypeError` for an unknown name.
    """

    __slots__ = ()

    def __new__(cls, **settings: Any) -> Self:
        for name in settings:
            if name not in cls._fields:
                raise TypeError(f"unknown option {name!r}; known are {', '.join(sorted(cls._fields))}")
        if (backend := settings.get("rdma_backend", "auto")) not in RDMA_BACKENDS:
            raise ValueError(f"option 'rdma_backend' must be one of {', '.join(RDMA_BACKENDS)}, not {backend!r}")
        if (ipc := settings.get("cuda_ipc", "auto")) not in CUDA_IPC:
            raise ValueError(f"option 'cuda_ipc' must be one of {', '.join(CUDA_IPC)}, not {ipc!r}")
        if metrics := settings.get("metrics", ""):
            parse_address(metrics)
        for name, value in settings.items():
            if not isinstance(value, bool | str) and value <= 0:
                raise ValueError(f"option {name!r} must be positive, got {value!r}")
        return super().__new__(cls, **settings)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def with_(self, **changes: Any) -> Options:
        """A copy with some settings changed."""
        return Options(**{**self._asdict(), **changes})
