"""Compressions among members that are generators in one process, driven in lockstep: errors against float64, equal results, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_async import UsageError
from monarch_async.tensor.compressors import BF16, FP8, FP16, AllGather, AllReduce, AllToAll, Compression, Place, PowerSGD, Request


def exchange(requests: Sequence[Request]) -> list[list[torch.Tensor]]:
    """What the members are answered."""
    first = requests[0]
    tensors = [request[0] for request in requests]
    assert 1 == len({(type(request), tuple(request[0].shape), request[0].dtype) for request in requests})
    if isinstance(first, AllReduce):
        total = sum(tensors[1:], tensors[0].clone())
        for tensor in tensors:
            tensor.copy_(total)
        return [[tensor] for tensor in tensors]
    if isinstance(first, AllToAll):
        return [[rows[index] for rows in tensors] for index in range(len(tensors))]
    assert isinstance(first, AllGather)
    return [tensors] * len(tensors)


def together(
    members: Sequence[Compression], tensors: Sequence[list[torch.Tensor]], *, mean: bool = False, epoch: int = 0, keys: Any = None
) -> int:
    """Let every member take its tensors through all steps; how many these were."""
    place = Place("group", epoch, len(members))
    names = keys or range(len(tensors[0]))
    runs = [member.run(mine, names, place, mean) for member, mine in zip(members, tensors, strict=True)]
    answers: list[Any] = [None] * len(runs)
    count = 0
    while True:
        requests = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                requests.append(run.send(answer))
            except StopIteration:
                pass
        if not requests:
            return count
        assert len(runs) == len(requests)
        answers = list(exchange(requests))
        count += 1


number = st.floats(-1000, 1000, width=32)


@pytest.mark.parametrize("mean", [False, True])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_errors_are_within_their_bounds(mean: bool, data: st.DataObject) -> None:
    """What each class says of its error holds for each element, for sums and means of 1 to 4 members; all members have the same."""
    size = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 30))
    numbers = torch.tensor(data.draw(st.lists(number, min_size=size * count, max_size=size * count))).view(size, count)
    exact = numbers.double().mean(0) if mean else numbers.double().sum(0)
    magnitudes = numbers.double().abs().sum(0)
    chunk = numbers.double().abs().amax(1).sum()  # no chunk has more than all there is
    bounds = {
        BF16: magnitudes * (size + 1) * 2.0**-8,
        FP16: magnitudes * (size + 1) * 2.0**-11 + size * 2.0**-24,
        FP8: magnitudes / 7 + chunk * 2.0**-17,
    }
    for kind, bound in bounds.items():
        allowed = bound / size if mean else bound
        allowed = allowed + (size * 2.0**-24 if kind is FP16 else 0)
        members = [FP8(7, 0) if kind is FP8 else kind() for _ in range(size)]
        mine = [[row.clone()] for row in numbers]
        together(members, mine, mean=mean)
        assert bool(((mine[0][0].double() - exact).abs() <= allowed + 1e-30).all()), (kind, numbers, mine[0][0])
        assert all(torch.equal(mine[0][0], other[0]) for other in mine)


def test_what_has_few_bits_or_elements_stays_exact() -> None:
    """16 bits are not made to 16 others; FP8 and PowerSGD leave what is small alone."""
    for compress, tensor in (
        (BF16(), torch.tensor([1.0009765625], dtype=torch.float16)),
        (FP16(), torch.tensor([2.0**100], dtype=torch.bfloat16)),
        (FP8(), torch.tensor([1.2345])),
        (PowerSGD(start_after=0), torch.tensor([1.2345, 5.4321])),
    ):
        before = tensor.clone()
        assert 1 == together([compress], [[tensor]])
        assert torch.equal(before, tensor)


def test_views_and_other_shapes_are_filled_in_place() -> None:
    """A tensor that is not contiguous, and one with several dimensions, get their values where they are."""
    for compress in (BF16(), FP16(), FP8(4, 0), PowerSGD(1, start_after=0)):
        whole = torch.arange(24.0).view(4, 6)
        column = whole[:, ::2]
        together([compress], [[column]], mean=True)
        assert bool((whole[:, 1::2] == torch.arange(24.0).view(4, 6)[:, 1::2]).all())
        assert (column - torch.arange(24.0).view(4, 6)[:, ::2]).abs().max() < 3


def gradients(step: int, size: int) -> list[list[torch.Tensor]]:
    """A matrix, a vector and a tensor of three dimensions for each member: something lasting, and noise."""
    random = torch.Generator().manual_seed(3)
    lasting = [torch.randn(*shape, generator=random) for shape in ((30, 20), (17,), (8, 5, 7))]
    made = []
    for member in range(size):
        random.manual_seed(1000 * step + member)
        made.append([part + torch.randn(part.shape, generator=random) for part in lasting])
    return made


def test_what_power_sgd_loses_comes_later() -> None:
    """With error feedback the sum over all steps is that of the true means, but for what is still kept; without it is not."""
    kept = {}
    for feedback in (True, False):
        members = [PowerSGD(2, start_after=1, error_feedback=feedback) for _ in range(3)]
        given = [torch.zeros(30, 20, dtype=torch.float64), torch.zeros(17, dtype=torch.float64), torch.zeros(8, 5, 7, dtype=torch.float64)]
        got = [part.clone() for part in given]
        for step in range(60):
            mine = gradients(step, 3)
            for place, part in enumerate(given):
                part += sum(member[place].double() for member in mine) / 3
            together(members, mine, mean=True)
            for place, part in enumerate(got):
                part += mine[0][place].double()
                assert all(torch.equal(mine[0][place], member[place]) for member in mine)
        torch.testing.assert_close(given[1], got[1], rtol=1e-5, atol=1e-4)  # one dimension: as it is
        kept[feedback] = [(given[place] - got[place]).norm() / given[place].norm() for place in (0, 2)]
        if feedback:
            still = torch.stack([error for member in members if (error := member._memories[0].error) is not None])
            torch.testing.assert_close(given[0] - got[0], still.double().mean(0), rtol=1e-3, atol=1e-3)
    for with_it, without in zip(kept[True], kept[False], strict=True):
        assert with_it < 0.25
        assert without > 2 * with_it


def test_power_sgd_begins_late_and_anew_with_each_epoch() -> None:
    """The first times are exact; then two exchanges in place of one; a new epoch begins as the first did, also for who comes new."""
    members = [PowerSGD(1, start_after=2) for _ in range(2)]
    steps = []
    for epoch in (0, 1):
        if epoch:
            members[1] = PowerSGD(1, start_after=2)
        for step in range(4):
            mine = gradients(step, 2)
            exact = (mine[0][0] + mine[1][0]) / 2
            steps.append(together(members, mine, mean=True, epoch=epoch))
            assert (step < 2) == torch.allclose(exact, mine[0][0], atol=1e-6)
    assert [1, 1, 3, 3] * 2 == steps


def test_power_sgd_gets_over_an_overflow() -> None:
    """inf is seen by all in that step, and by nobody in the next one."""
    members = [PowerSGD(1, start_after=0) for _ in range(2)]
    for step in range(3):
        mine = gradients(step, 2)
        if step == 1:
            mine[0][0][0, 0] = torch.inf
        together(members, mine, mean=True)
        assert [step != 1] * 2 == [bool(member[0].isfinite().all()) for member in mine]


def test_bytes_are_counted() -> None:
    """What moves is half, about a quarter, and what two thin matrices have; nothing moves where one is alone."""
    for compress, share in ((BF16(), 0.5), (FP16(), 0.5), (FP8(), 0.25 * (1 + 4 / 1024)), (PowerSGD(2, start_after=0), 0.02)):
        members = [compress, *(type(compress)() if not isinstance(compress, PowerSGD) else PowerSGD(2, start_after=0) for _ in range(3))]
        together(members, [[torch.ones(256, 128)] for _ in members])
        assert 256 * 128 * 4 * 2 * 3 // 4 == compress.traffic.plain
        if isinstance(compress, PowerSGD):
            share = (256 + 128) * 2 / (256 * 128)
        assert share == pytest.approx(compress.traffic.moved / compress.traffic.plain, rel=1e-3)
        assert f"moved={compress.traffic.moved:,}" in repr(compress.traffic)
    alone = BF16()
    together([alone], [[torch.ones(10)]])
    assert (0, 0) == (alone.traffic.moved, alone.traffic.plain)


def test_wrong_arguments_say_what_is_wanted() -> None:
    """Typed errors for settings, dtypes, reductions, names and a second group."""
    for make in (lambda: PowerSGD(0), lambda: PowerSGD(1, start_after=-1), lambda: FP8(0), lambda: FP8(1, -1)):
        with pytest.raises(UsageError, match=r"has to be at least"):
            make()
    with pytest.raises(TypeError, match=r"BF16 compresses real numbers, not torch\.int64"):
        BF16().check(torch.ones(3, dtype=torch.int64), "sum", None)
    with pytest.raises(UsageError, match="FP8 is for sums and means, and not for 'max'"):
        FP8().check(torch.ones(3), "max", None)
    with pytest.raises(UsageError, match="name it, key="):
        PowerSGD().check(torch.ones(3), "sum", None)
    used = PowerSGD()
    together([used], [[torch.ones(3, 3)]])
    with pytest.raises(UsageError, match="make another one for other"):
        next(used.run([torch.ones(3, 3)], ["w"], Place("other", 0, 1), False))
