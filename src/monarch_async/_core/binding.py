"""Arguments checked against an endpoint's signature at the call, before anything is sent.

`compile_binder` makes, once per endpoint, a function with the endpoint's own parameters that returns what is to be sent.
Python itself then checks each call, with its own messages, ten times faster than `inspect.Signature.bind`.

Rules: the receiver is left out (messages count the caller's arguments, not ``self``); defaults are not sent, the handler applies
them; what can go by position goes by position, since names cost bytes and time; annotations are not looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

__all__ = ["Binder", "compile_binder"]

Binder = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def compile_binder(function: Callable[..., Any], skip: int = 1) -> Binder:
    """A function that takes `function`'s arguments without the first `skip`, and returns ``(args, kwargs)`` to call it with.

    It raises the `TypeError` that a wrong call would. `compile_binder` raises `TypeError` when there is nothing to skip.
    """
    parameters = list(inspect.signature(function).parameters.values())
    name = getattr(function, "__qualname__", repr(function))
    receivers: list[str] = []
    while len(receivers) < skip and parameters and parameters[0].kind in _POSITIONAL:
        receiver = parameters.pop(0)
        if receiver.kind is Parameter.POSITIONAL_OR_KEYWORD:
            receivers.append(receiver.name)
        else:
            receivers.append("")
    if len(receivers) < skip and not (parameters and parameters[0].kind is Parameter.VAR_POSITIONAL):
        raise TypeError(f"{name}() takes no argument for the actor itself: make `self` its first parameter")
    taken = {parameter.name for parameter in parameters}
    missing, named, refuse = (_unused(word, taken) for word in ("missing", "named", "refuse"))

    def twice(argument: str) -> None:
        raise TypeError(f"{name}() got multiple values for argument {argument!r}")

    source = "\n".join(_source(parameters, [name for name in receivers if name], missing, named, refuse))
    space: dict[str, Any] = {missing: object(), refuse: twice}
    exec(compile(source, f"<arguments of {name}>", "exec"), space)
    binder: Any = space["bind"]
    binder.__qualname__ = name
    binder.__name__ = getattr(function, "__name__", name)
    return binder  # type: ignore[no-any-return]


def _unused(word: str, taken: set[str]) -> str:
    while word in taken or word == "bind":
        word += "_"
    return word


def _source(parameters: list[Parameter], receivers: list[str], missing: str, named: str, refuse: str) -> Iterator[str]:
    """The binder's lines: header, names, then the shortest positional part for what was given."""
    optional = {parameter.name for parameter in parameters if parameter.default is not Parameter.empty}
    positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    keywords = [parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
    rest = next((parameter.name for parameter in parameters if parameter.kind is Parameter.VAR_POSITIONAL), "")
    extra = next((parameter.name for parameter in parameters if parameter.kind is Parameter.VAR_KEYWORD), "")

    bare = [parameter.replace(annotation=Parameter.empty, default=Parameter.empty) for parameter in parameters]
    texts = [f"{parameter}={missing}" if parameter.name in optional else str(parameter) for parameter in bare]
    only = sum(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in parameters)
    if only:
        texts.insert(only, "/")
    if keywords and not rest:
        texts.insert(len(positional) + bool(only), "*")
    yield f"def bind({', '.join(texts)}):"

    if extra:
        for receiver in receivers:
            yield f" if {receiver!r} in {extra}: {refuse}({receiver!r})"
    given = ", ".join(f"{key!r}: {key}" for key in keywords if key not in optional)
    always = f"{{{given}{', ' if given and extra else ''}{f'**{extra}' if extra else ''}}}"
    late = [key for key in keywords if key in optional]
    defaults = [key for key in positional if key in optional]
    if not late and len(defaults) < 2:
        named = always  # nothing is ever added to it
    else:
        yield f" {named} = {always}"
    for key in late:
        yield f" if {key} is not {missing}: {named}[{key!r}] = {key}"
    for index, key in enumerate(defaults):
        before = positional[: len(positional) - len(defaults) + index]
        yield f" if {key} is {missing}:"
        for other in defaults[index + 1 :]:
            yield f"  if {other} is not {missing}: {named}[{other!r}] = {other}"
        yield f"  return {_tuple(before, '')}, {named}"
    yield f" return {_tuple(positional, rest)}, {named}"


def _tuple(names: list[str], rest: str) -> str:
    items = "".join(f"{name}, " for name in names)
    if not rest:
        return f"({items})"
    return f"({items}*{rest},)" if items else rest
