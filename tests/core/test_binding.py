"""Calls are checked against the endpoint's signature as Python itself would, and what is sent calls the endpoint to the same effect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_async._core.binding import compile_binder


class Echo:
    def nothing(self) -> Any: ...
    def echo(self, x: int) -> Any:
        return x

    def two(self, x: int, y: int = 1) -> Any:
        return x, y

    def defaults(self, a: Any = 1, b: Any = 2, c: Any = 3) -> Any:
        return a, b, c

    def only(self, a: Any, b: Any = 2, /, c: Any = 3) -> Any:
        return a, b, c

    def rest(self, a: Any, *rest: Any) -> Any:
        return a, rest

    def late(self, *, k: Any, m: Any = 5) -> Any:
        return k, m

    def full(self, a: Any, /, b: Any, c: Any = 1, d: Any = 2, *rest: Any, k: Any, m: Any = 3, **extra: Any) -> Any:
        return a, b, c, d, rest, k, m, extra

    def clash(self, bind: Any, missing: Any = 1, named: Any = 2, *, refuse: Any = 3, **missing_: Any) -> Any:
        return bind, missing, named, refuse, missing_

    def __mangled(self, __x: Any = 1) -> Any:  # noqa: PYI063 (a mangled name, not a positional-only one)
        return __x

    def everything(*args: Any, **kwargs: Any) -> Any:
        return args[1:], kwargs

    def no_receiver() -> Any: ...  # type: ignore[misc]


METHODS = [function for name, function in vars(Echo).items() if inspect.isfunction(function) and name != "no_receiver"]


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    try:
        return "value", call(*args, **kwargs)
    except TypeError as error:
        return "TypeError", str(error)


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "expected"),
    [
        (Echo.echo, (), {}, "Echo.echo() missing 1 required positional argument: 'x'"),
        (Echo.echo, (1, 2), {}, "Echo.echo() takes 1 positional argument but 2 were given"),
        (Echo.echo, (1,), {"z": 1}, "Echo.echo() got an unexpected keyword argument 'z'"),
        (Echo.echo, (1,), {"x": 2}, "Echo.echo() got multiple values for argument 'x'"),
        (Echo.late, (), {}, "Echo.late() missing 1 required keyword-only argument: 'k'"),
        (Echo.full, (1, 2), {}, "Echo.full() missing 1 required keyword-only argument: 'k'"),
        (Echo.only, (), {"a": 1}, "Echo.only() got some positional-only arguments passed as keyword arguments: 'a'"),
        (Echo.clash, (1,), {"self": 2}, "Echo.clash() got multiple values for argument 'self'"),
    ],
)
def test_wrong_calls_raise_pythons_own_error(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str) -> None:
    """A wrong call raises TypeError at the call, with the message that Python gives for methods, counting the caller's arguments."""
    assert ("TypeError", expected) == outcome(compile_binder(method), *args, **kwargs)


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "expected"),
    [
        (Echo.nothing, (), {}, ((), {})),
        (Echo.echo, (), {"x": 1}, ((1,), {})),
        (Echo.two, (1,), {}, ((1,), {})),
        (Echo.two, (), {"y": 2, "x": 1}, ((1, 2), {})),
        (Echo.defaults, (), {"c": 9}, ((), {"c": 9})),
        (Echo.defaults, (0,), {"c": 9}, ((0,), {"c": 9})),
        (Echo.only, (0,), {"c": 9}, ((0,), {"c": 9})),
        (Echo.late, (), {"k": 1}, ((), {"k": 1})),
        (Echo.rest, (1, 2, 3), {}, ((1, 2, 3), {})),
        (Echo.full, (1, 2, 3, 4, 5), {"k": 6, "z": 7}, ((1, 2, 3, 4, 5), {"k": 6, "z": 7})),
    ],
)
def test_what_is_sent(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
    """Arguments go by position where that is possible, and defaults are not sent."""
    assert expected == compile_binder(method)(*args, **kwargs)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.__name__))
@given(st.data())
def test_same_effect_as_a_direct_call(method: Any, data: st.DataObject) -> None:
    """For any arguments, either both the binder and the method refuse, or the method gives the same by way of the binder."""
    names = sorted({*inspect.signature(method).parameters, "other", "self"})
    args = data.draw(st.lists(st.integers(10, 99), max_size=6))
    kwargs = data.draw(st.dictionaries(st.sampled_from(names), st.integers(100, 199), max_size=4))
    echo = Echo()
    direct = outcome(functools.partial(method, echo), *args, **kwargs)
    bound = outcome(compile_binder(method), *args, **kwargs)
    assert direct[0] == bound[0]
    if bound[0] == "value":
        assert direct == outcome(functools.partial(method, echo), *bound[1][0], **bound[1][1])


def test_skip_none() -> None:
    """With nothing to skip a plain function is bound whole."""

    def function(x: int, y: int = 0) -> None: ...

    assert ((1, 2), {}) == compile_binder(function, skip=0)(1, y=2)


def test_decorated_method_keeps_its_signature() -> None:
    """The signature that `functools.wraps` declares is the one that counts."""

    @functools.wraps(Echo.two)
    def wrapper(*args: Any, **kwargs: Any) -> Any: ...

    assert "missing 1 required positional argument: 'x'" in outcome(compile_binder(wrapper))[1]


def test_method_without_self_is_refused() -> None:
    """A method that can't take its actor is refused when it is declared, not when it is called."""
    with pytest.raises(TypeError, match=r"Echo\.no_receiver\(\) takes no argument for the actor itself: make `self` its first"):
        compile_binder(Echo.no_receiver)


def test_many_defaults() -> None:
    """A signature with many defaults compiles, and any subset goes through."""
    parameters = ", ".join(f"p{index}=0" for index in range(40))
    space: dict[str, Any] = {}
    exec(f"def many(self, {parameters}): return locals()", space)
    args, kwargs = compile_binder(space["many"])(1, p20=2, p39=3)
    assert ((1,), {"p20": 2, "p39": 3}) == (args, kwargs)


def test_default_that_equals_anything() -> None:
    """Defaults and arguments are never compared, only told apart by identity."""

    class Equal:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    value = Equal()

    def function(self: Any, x: Any = value) -> None: ...

    args, kwargs = compile_binder(function)(value)
    assert value is args[0]
    assert {} == kwargs
