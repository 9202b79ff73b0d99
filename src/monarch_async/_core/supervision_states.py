"""The states of supervision, and every way from one to another, in two tables.

`_core/supervision.py` changes a state by these tables and in no other way; what they don't hold is an `InternalError`. The picture in
docs/supervision-states.md is made from them by `diagram`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from monarch_async.errors import InternalError

__all__ = ["CHILD_MOVES", "PHASE_MOVES", "ChildState", "Move", "Phase", "Turn", "diagram", "next_state"]


class ChildState(Enum):
    """Of one child. In the first three it is or may be there; in the others it is not."""

    STARTING = "starting"  # told to start, has not said yet that it has
    RUNNING = "running"
    STOPPING = "stopping"  # told to stop, has not ended yet
    DELAYED = "delayed"  # ended, and will be started again: once its delay is over and what stops with it has stopped
    STOPPED = "stopped"  # ended, and stays so, unless a sibling's restart takes it along
    REMOVED = "removed"  # ended for good


class Phase(Enum):
    """Of the whole."""

    SUPERVISING = "supervising"
    ENDING = "ending"  # whatever still is there has been told to stop; nothing is started any more
    ENDED = "ended"  # nothing is there any more


class Move(Enum):
    """What happens to a child."""

    STARTED = "it has started"
    RESTART = "ended, to be started again"
    START = "told to start again"
    STOP = "told to stop"
    END = "ended, stays so"
    REMOVE = "ended, was temporary"


class Turn(Enum):
    """What happens to the whole."""

    END = "shutdown, automatic shutdown or escalation"
    LAST_GONE = "the last child has ended"


CHILD_MOVES: Mapping[tuple[ChildState, Move], ChildState] = {
    (ChildState.STARTING, Move.STARTED): ChildState.RUNNING,
    (ChildState.STARTING, Move.RESTART): ChildState.DELAYED,
    (ChildState.STARTING, Move.STOP): ChildState.STOPPING,
    (ChildState.STARTING, Move.END): ChildState.STOPPED,
    (ChildState.STARTING, Move.REMOVE): ChildState.REMOVED,
    (ChildState.RUNNING, Move.RESTART): ChildState.DELAYED,
    (ChildState.RUNNING, Move.STOP): ChildState.STOPPING,
    (ChildState.RUNNING, Move.END): ChildState.STOPPED,
    (ChildState.RUNNING, Move.REMOVE): ChildState.REMOVED,
    (ChildState.STOPPING, Move.RESTART): ChildState.DELAYED,
    (ChildState.STOPPING, Move.END): ChildState.STOPPED,
    (ChildState.DELAYED, Move.START): ChildState.STARTING,
    (ChildState.DELAYED, Move.END): ChildState.STOPPED,
    (ChildState.STOPPED, Move.RESTART): ChildState.DELAYED,
}

PHASE_MOVES: Mapping[tuple[Phase, Turn], Phase] = {
    (Phase.SUPERVISING, Turn.END): Phase.ENDING,
    (Phase.ENDING, Turn.LAST_GONE): Phase.ENDED,
}

S = TypeVar("S", bound=Enum)
M = TypeVar("M", bound=Enum)


def next_state(table: Mapping[tuple[S, M], S], state: S, move: M) -> S:
    """The state that follows; `InternalError` if none does."""
    following = table.get((state, move))
    if following is None:
        raise InternalError(f"supervision: {move.name} can't happen in state {state.name}")
    return following


def diagram() -> str:
    """Both tables as one Mermaid diagram."""
    return "\n".join(["stateDiagram-v2", *_part("Child", CHILD_MOVES), *_part("Supervision", PHASE_MOVES)]) + "\n"


def _part(name: str, table: Mapping[tuple[S, M], S]) -> list[str]:
    (first, _), *_ = table
    left = {state for state, _ in table}
    arrows = [f"[*] --> {first.name}"]
    arrows += [f"{state.name} --> {following.name}: {move.value}" for (state, move), following in table.items()]
    arrows += [f"{state.name} --> [*]" for state in type(first) if state not in left]
    return [f"    state {name} {{", *(f"        {arrow}" for arrow in arrows), "    }"]
