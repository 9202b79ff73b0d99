"""How old requests are is known from which number came next, and when."""

from __future__ import annotations

import itertools

from monarch_async._runtime.ages import KEPT, Ages


def test_a_request_is_as_old_as_the_first_look_after_it() -> None:
    """So an age is never too high; one since which nobody has looked has none yet."""
    requests = itertools.count(1)
    ages = Ages(requests)
    ages.look(10.0)
    first = next(requests)
    assert 0.0 == ages.age(first, 10.4)
    ages.look(10.5)
    second = next(requests)
    ages.look(11.0)
    ages.look(11.5)
    assert [9.5, 9.0] == [ages.age(number, 20.0) for number in (first, second)]
    assert 3 == next(requests)


def test_looks_become_sparser_with_their_age() -> None:
    """Few are kept, the order stays, and of an old request the age is known to within some percent."""
    requests = itertools.count(1)
    ages = Ages(requests)
    made = {}
    for second in range(20 * KEPT):
        made[next(requests)] = float(second)
        ages.look(float(second))
    assert len(ages._times) <= KEPT
    assert sorted(ages._numbers) == ages._numbers
    now = 20.0 * KEPT
    for number, when in list(made.items())[:: KEPT // 7]:
        assert 0.85 * (now - when) <= ages.age(number, now) <= now - when
