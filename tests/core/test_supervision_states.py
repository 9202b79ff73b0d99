"""The tables of supervision's states, and the page made from them."""

from __future__ import annotations

import pytest

from monarch_async._core.supervision_states import CHILD_MOVES, PHASE_MOVES, ChildState, Move, Phase, Turn, next_state
from monarch_async.errors import InternalError
from tests.core.supervision_diagram import PAGE, with_diagram


def test_every_pair_of_state_and_move_is_in_the_table_or_refused() -> None:
    """Nothing that the tables don't hold can happen to a child or to the whole."""
    allowed = {(state, move) for state in ChildState for move in Move if (state, move) in CHILD_MOVES}
    assert 14 == len(allowed)
    for state in ChildState:
        for move in Move:
            if (state, move) not in allowed:
                with pytest.raises(InternalError, match=f"{move.name} can't happen in state {state.name}"):
                    next_state(CHILD_MOVES, state, move)
    with pytest.raises(InternalError, match="END can't happen in state ENDED"):
        next_state(PHASE_MOVES, Phase.ENDED, Turn.END)


def test_every_state_can_be_reached() -> None:
    """No state of the tables is there for nothing."""
    assert set(ChildState) - {ChildState.STARTING} <= set(CHILD_MOVES.values())
    assert set(Phase) - {Phase.SUPERVISING} == set(PHASE_MOVES.values())


def test_the_page_shows_the_tables() -> None:
    """docs/supervision-states.md has the diagram of what the code moves by."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_diagram(page) == page, "write the page anew: python -m tests.core.supervision_diagram"
    assert "RUNNING --> STOPPING: told to stop" in page
