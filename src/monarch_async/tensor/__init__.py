"""Tensor actors: collective operations between the members of a mesh of actors, awaited, and never hanging.

    from monarch_async.tensor import TensorActor, why_stuck

See docs/collectives.md. Importing this imports torch.
"""

from __future__ import annotations

from monarch_async.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
from monarch_async.tensor.actor import TensorActor, communicator
from monarch_async.tensor.backend import Backend, Running
from monarch_async.tensor.communicator import Communicator
from monarch_async.tensor.ledger import LedgerEntry
from monarch_async.tensor.stuck import StuckReport, why_stuck

__all__ = [
    "Backend",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "LedgerEntry",
    "PeerLost",
    "Running",
    "StuckReport",
    "TensorActor",
    "communicator",
    "why_stuck",
]
