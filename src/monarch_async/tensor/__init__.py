"""Tensors of many processes: collective operations between the members of a mesh, awaited and never hanging, and state dicts that are
published and pulled.

    from monarch_async.tensor import StateDict, TensorActor, why_stuck

See docs/collectives.md and docs/weight-sync.md. Names are loaded when they are first used, and torch with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch_async.mesh import added

if TYPE_CHECKING:
    from monarch_async.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
    from monarch_async.tensor.actor import TensorActor, communicator
    from monarch_async.tensor.backend import Backend, Running
    from monarch_async.tensor.comm import Communicator
    from monarch_async.tensor.compression import BF16, FP8, FP16, Compression, PowerSGD, Traffic, ddp_hook
    from monarch_async.tensor.ledger import LedgerEntry
    from monarch_async.tensor.state_dict import Published, StateDict
    from monarch_async.tensor.state_errors import PublisherGone, StateMismatch
    from monarch_async.tensor.state_parts import TensorSlice
    from monarch_async.tensor.state_pull import Pulled
    from monarch_async.tensor.stuck import StuckReport, why_stuck

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "Backend",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Compression",
    "LedgerEntry",
    "PeerLost",
    "PowerSGD",
    "Published",
    "PublisherGone",
    "Pulled",
    "Running",
    "StateDict",
    "StateMismatch",
    "StuckReport",
    "TensorActor",
    "TensorSlice",
    "Traffic",
    "communicator",
    "ddp_hook",
    "why_stuck",
]

_HOMES = {
    "errors": ("CollectiveError", "CollectiveMismatch", "CollectiveTimeout", "PeerLost"),
    "tensor.actor": ("TensorActor", "communicator"),
    "tensor.backend": ("Backend", "Running"),
    "tensor.comm": ("Communicator",),
    "tensor.compression": ("BF16", "FP16", "FP8", "Compression", "PowerSGD", "Traffic", "ddp_hook"),
    "tensor.ledger": ("LedgerEntry",),
    "tensor.state_dict": ("Published", "StateDict"),
    "tensor.state_errors": ("PublisherGone", "StateMismatch"),
    "tensor.state_parts": ("TensorSlice",),
    "tensor.state_pull": ("Pulled",),
    "tensor.stuck": ("StuckReport", "why_stuck"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def _load(name: str) -> Any:
    value = globals()[name] = getattr(import_module(f"monarch_async.{_HOME[name]}"), name)
    return value


added["communicator"] = lambda mesh, **settings: _load("communicator")(mesh, **settings)

if not TYPE_CHECKING:  # or a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
