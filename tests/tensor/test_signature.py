"""What members say of an operation, and whether it fits."""

from __future__ import annotations

import pytest

from monarch_async.tensor.signature import Signature, describe_mismatch, fits, signature_from, to_wire

SUM = Signature("all_reduce", ("sum", "float32", "cpu", (4,)))


@pytest.mark.parametrize(
    ("other", "with_shapes", "without"),
    [
        (SUM, True, True),
        (SUM._replace(common=("sum", "float32", "cpu", (8,))), False, True),
        (SUM._replace(common=("max", "float32", "cpu", (4,))), False, True),
        (SUM._replace(own=(b"1234",)), True, True),
        (SUM._replace(kind="reduce"), False, False),
        (Signature("barrier"), False, False),
    ],
)
def test_what_fits(other: Signature, with_shapes: bool, without: bool) -> None:
    """The kind always counts, what is common only where shapes are looked at, and what is a member's own never."""
    assert with_shapes == fits(SUM, to_wire(other), shapes=True)
    assert without == fits(SUM, to_wire(other), shapes=False)


def test_parts_fit_one_by_one() -> None:
    """Of coalesced operations each has to fit, and there must be as many."""
    other = SUM._replace(common=("sum", "float32", "cpu", (8,)))
    both = Signature("coalesced", parts=(SUM, Signature("barrier")))
    assert fits(both, to_wire(both), shapes=True)
    assert not fits(both, to_wire(both._replace(parts=(SUM,))), shapes=False)
    assert not fits(both, to_wire(both._replace(parts=(other, Signature("barrier")))), shapes=True)
    assert fits(both, to_wire(both._replace(parts=(other, Signature("barrier")))), shapes=False)


def test_there_and_back() -> None:
    """A view arrives as it was sent."""
    whole = Signature("coalesced", parts=(SUM, Signature("gather", ("to 0",), ((2, 3), b"data"))))
    assert whole == signature_from(to_wire(whole))


def test_words_for_a_mismatch() -> None:
    """The fewest come first, with what they last finished; the values of small tensors are not shown."""
    views = {0: SUM._replace(own=(b"secret",)), 1: Signature("barrier"), 2: SUM}
    expected = (
        "operation 3 of members differs between ranks, and nothing was moved: "
        "rank 1 called barrier (last finished: operation 1, gather); ranks 0, 2 called all_reduce sum float32 cpu (4,)"
    )
    assert expected == describe_mismatch("members", 3, views, {0: "operation 2, barrier", 1: "operation 1, gather"})
    assert "(last finished: nothing)" in describe_mismatch("members", 1, views, {1: ""})
