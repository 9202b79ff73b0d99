"""What shall go wrong, where and when: faults, plans of them, and the line that a plan is written as. Pure values.

A fault names its kind, a member of a mesh (of processes or of actors) and when: at a *step*, the n-th message that this member handles
(of one endpoint only, if that is named), or at a *time*, seconds after the plan was started. `KINDS` is the list of all kinds with their
parameters; whatever is not in it is refused when a fault is made.

A plan is written as one line, and read from it again::

    seed=7; kill workers[2] step=3; fail workers[0] step=1 endpoint="train" type="builtins:ValueError" text="bad"

Values are JSON; so is the name of a mesh that is not made of letters, digits, ``_``, ``-`` and ``.``. Parameters that have
their default are left out.

Messages that a fault of a constructor counts are constructions: ``step=2`` is the second time that this member is constructed.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["CLIENT", "KINDS", "Fault", "Kind", "Parameter", "Plan", "draw", "member", "read_member"]

CLIENT = "client"
"""The other end of a link, where that is the program itself."""

Value = int | float | str
Family = Literal["signal", "process", "actor", "constructor", "link"]


class Parameter(NamedTuple):
    """One parameter of a kind: of which type it is, what it is by default (`None`: it must be given), and between which bounds."""

    type: type
    default: Value | None = None
    least: float = 0.0
    most: float = math.inf
    above: float = -math.inf
    choices: tuple[str, ...] = ()


class Kind(NamedTuple):
    """What a kind of fault concerns, and its parameters."""

    family: Family
    parameters: Mapping[str, Parameter] = {}


_SECONDS = Parameter(float, above=0.0, most=86_400.0)
_ERROR = {"type": Parameter(str, "builtins:RuntimeError"), "text": Parameter(str, "injected")}
_TO = Parameter(str, CLIENT)
_WAY = Parameter(str, "both", choices=("both", "out", "in"))
_ONE_WAY = Parameter(str, "out", choices=("out", "in"))
_FRAMES = Parameter(int, 1, least=1)

KINDS: dict[str, Kind] = {
    "kill": Kind("signal"),
    "freeze": Kind("signal", {"seconds": Parameter(float, 0.0, most=86_400.0)}),  # 0: until it is thawed
    "thaw": Kind("signal"),
    "exit": Kind("process", {"code": Parameter(int, 1, most=255)}),
    "leave_child": Kind("process", {"seconds": Parameter(float, 60.0, above=0.0, most=86_400.0)}),
    "exhaust_memory": Kind(
        "process", {"limit": Parameter(int, 64 << 20, least=1 << 20, most=1 << 40), "seconds": Parameter(float, 0.0, most=86_400.0)}
    ),
    "block": Kind("process", {"seconds": _SECONDS}),
    "hold_gil": Kind("process", {"seconds": _SECONDS}),
    "fail": Kind("actor", _ERROR),
    "fail_constructor": Kind("constructor", _ERROR),
    "delay": Kind("link", {"to": _TO, "by": _SECONDS, "seconds": _SECONDS, "way": _WAY}),
    "throttle": Kind("link", {"to": _TO, "rate": Parameter(float, least=1.0), "seconds": _SECONDS, "way": _WAY}),
    "cut": Kind("link", {"to": _TO, "seconds": _SECONDS, "way": _WAY}),
    "reset": Kind("link", {"to": _TO}),
    "drop": Kind("link", {"to": _TO, "frames": _FRAMES, "way": _ONE_WAY}),
    "duplicate": Kind("link", {"to": _TO, "frames": _FRAMES, "way": _ONE_WAY}),
    "corrupt": Kind("link", {"to": _TO, "frames": _FRAMES, "way": _ONE_WAY, "bit": Parameter(int, 0)}),
}

_PLAIN = re.compile(r"[\w.-]+", re.ASCII)
_WORD = re.compile(r"[a-z_]+")
_MEMBER = re.compile(r"(.+)\[(\d+)\]", re.DOTALL)
_TYPE = re.compile(r"[^\s:]+:[^\s:]+")
_decode = json.JSONDecoder().raw_decode


def member(mesh: str, rank: int) -> str:
    """How the other end of a link is written: ``"workers[1]"``."""
    return f"{mesh}[{rank}]"


def read_member(text: str) -> tuple[str, int] | None:
    """Mesh and rank of what `member` wrote; `None` for the client. Raises `ValueError` for anything else."""
    if text == CLIENT:
        return None
    found = _MEMBER.fullmatch(text)
    if found is None:
        raise ValueError(f'the other end of a link is "{CLIENT}" or "mesh[rank]", not {text!r}')
    return found[1], int(found[2])


class Fault(NamedTuple):
    """One thing that shall go wrong; made by `Fault.of`, which refuses what can't be."""

    kind: str
    mesh: str
    rank: int
    step: int | None
    time: float | None
    endpoint: str
    values: tuple[tuple[str, Value], ...]
    """All parameters of its kind, in the order of `KINDS`."""

    @classmethod
    def of(
        cls,
        kind: str,
        *,
        mesh: str,
        rank: int,
        step: int | None = None,
        time: float | None = None,
        endpoint: str = "",
        **parameters: Value,
    ) -> Fault:
        """A valid fault. Raises `TypeError` for a value of a wrong type, `ValueError` for all else that can't be, and says what can."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of fault {kind!r}; known are {', '.join(KINDS)}")
        named: Any = mesh
        if not (isinstance(named, str) and named):
            raise TypeError(f"mesh is the name of a mesh of processes or actors, not {mesh!r}")
        if not _is_int(rank):
            raise TypeError(f"rank is the position of a member in its mesh, not {rank!r}")
        if rank < 0:
            raise ValueError(f"rank must be 0 or more, not {rank}")
        time = _check_when(kind, step, time, endpoint)
        family, known = KINDS[kind]
        for name in parameters:
            if name not in known:
                raise ValueError(f"{kind} has no parameter {name!r}; it has {', '.join(known) or 'none'}")
        values = tuple((name, _check(kind, name, parameter, parameters.get(name))) for name, parameter in known.items())
        fault = cls(kind, mesh, rank, step, time, endpoint, values)
        if family == "link" and read_member(fault.value("to")) == (mesh, rank):
            raise ValueError(f"a link joins two processes; both ends would be {member(mesh, rank)}")
        if kind == "exhaust_memory" and time is not None and not fault.value("seconds"):
            raise ValueError("exhaust_memory at a time needs seconds=…, since no handler is there to get the MemoryError")
        if "type" in known and not _TYPE.fullmatch(fault.value("type")):
            raise ValueError(f'the type of an exception is "module:name", not {fault.value("type")!r}')
        return fault

    def value(self, name: str) -> Any:
        """A parameter by its name."""
        return dict(self.values)[name]

    @property
    def family(self) -> Family:
        return KINDS[self.kind].family

    @property
    def to(self) -> tuple[str, int] | None:
        """The other end of a link; `None` for the client."""
        return read_member(self.value("to"))

    def __str__(self) -> str:
        mesh = self.mesh if _PLAIN.fullmatch(self.mesh) else json.dumps(self.mesh)
        fields: dict[str, Value | None] = {"step": self.step, "time": self.time, "endpoint": self.endpoint or None}
        known = KINDS[self.kind].parameters
        fields |= {name: value for name, value in self.values if value != known[name].default}
        written = [f"{name}={json.dumps(value)}" for name, value in fields.items() if value is not None]
        return " ".join([self.kind, f"{mesh}[{self.rank}]", *written])


def _check_when(kind: str, step: int | None, time: float | None, endpoint: str) -> float | None:
    """Whether a fault has a proper moment; returns its time."""
    if (step is None) == (time is None):
        raise ValueError(f"{kind} needs either step= (the n-th message that is handled, from 1) or time= (seconds after the start)")
    if step is not None and not _is_int(step):
        raise TypeError(f"step is a whole number, not {step!r}")
    if step is not None and step < 1:
        raise ValueError(f"steps count from 1; step={step} never comes")
    if time is not None:
        if isinstance(time, bool) or not isinstance(time, int | float):
            raise TypeError(f"time is a number of seconds, not {time!r}")
        if not 0 <= time < math.inf:
            raise ValueError(f"time must be 0 or more seconds after the start, not {time!r}")
        time = float(time)
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint is the name of an endpoint, not {endpoint!r}")
    if endpoint and step is None:
        raise ValueError("endpoint= goes with step=: it says which messages are counted")
    if kind == "fail_constructor" and (step is None or endpoint):
        raise ValueError("fail_constructor takes step= alone, the n-th construction: a constructor runs when the actor is spawned")
    return time


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(kind: str, name: str, parameter: Parameter, value: Value | None) -> Value:
    if value is None:
        if parameter.default is None:
            raise ValueError(f"{kind} needs {name}=…")
        return parameter.default
    if parameter.type is float and _is_int(value):
        value = float(value)
    if not isinstance(value, parameter.type) or isinstance(value, bool):
        raise TypeError(f"{name} of {kind} is of type {parameter.type.__name__}, not {value!r}")
    if isinstance(value, str):
        if parameter.choices and value not in parameter.choices:
            raise ValueError(f"{name} of {kind} is one of {', '.join(parameter.choices)}, not {value!r}")
    elif not parameter.least <= value <= parameter.most or value <= parameter.above or not math.isfinite(value):
        low = f"above {parameter.above:g}" if parameter.above >= parameter.least else f"at least {parameter.least:g}"
        raise ValueError(f"{name} of {kind} must be {low} and at most {parameter.most:g}, not {value!r}")
    return value


class Plan(NamedTuple):
    """A seed and faults, in the order in which they were asked for. ``str(plan)`` is the line; `parse` reads it."""

    seed: int
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"seed={self.seed}", *map(str, self.faults)])

    @classmethod
    def parse(cls, line: str) -> Plan:
        """Raises `ValueError` and `TypeError` for what is no line of a plan, and says where."""
        reader = _Reader(line)
        reader.expect("seed=")
        seed = reader.value()
        if not _is_int(seed):
            raise reader.wrong("a seed is a whole number")
        faults = []
        while not reader.at_end():
            reader.expect("; ")
            faults.append(reader.fault())
        return cls(seed, tuple(faults))


class _Reader:
    def __init__(self, line: str) -> None:
        self.line = line
        self.position = 0

    def wrong(self, why: str) -> ValueError:
        return ValueError(f"no line of a plan, at character {self.position} ({self.line[self.position : self.position + 20]!r}): {why}")

    def at_end(self) -> bool:
        return self.position == len(self.line)

    def expect(self, text: str) -> None:
        if not self.line.startswith(text, self.position):
            raise self.wrong(f"expected {text!r}")
        self.position += len(text)

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.line, self.position)
        if found is None:
            raise self.wrong(f"expected {what}")
        self.position = found.end()
        return found[0]

    def value(self) -> Any:
        try:
            value, self.position = _decode(self.line, self.position)
        except ValueError as error:
            raise self.wrong(f"expected a value: {error}") from None
        return value

    def fault(self) -> Fault:
        kind = self.match(_WORD, "a kind of fault")
        self.expect(" ")
        mesh = self.value() if self.line.startswith('"', self.position) else self.match(_PLAIN, "the name of a mesh")
        self.expect("[")
        rank = self.value()
        self.expect("]")
        fields: dict[str, Any] = {}
        while self.line.startswith(" ", self.position):
            self.expect(" ")
            name = self.match(_WORD, "the name of a parameter")
            if name in fields or name in ("kind", "mesh", "rank"):
                raise self.wrong(f"{name} is given twice")
            self.expect("=")
            fields[name] = self.value()
        return Fault.of(kind, mesh=mesh, rank=rank, **fields)


def draw(rng: random.Random, count: int, *, kinds: Sequence[str], mesh: str, ranks: Sequence[int], within: float) -> list[Fault]:
    """`count` faults of these kinds, at times within `within` seconds, each on one of `ranks`.

    Links join two of these, or one and the client. A constructor's fault is on the first construction. Raises `ValueError` for an unknown
    kind and for figures that can't be.
    """
    if not _is_int(count) or count < 0:
        raise ValueError(f"n is how many faults to draw, not {count!r}")
    if not kinds or not ranks:
        raise ValueError("random faults need kinds, and ranks to happen to")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of fault {kind!r}; known are {', '.join(KINDS)}")
    if not 0 < within < math.inf:
        raise ValueError(f"within is a positive number of seconds, not {within!r}")
    found = []
    for _ in range(count):
        kind = rng.choice(list(kinds))
        rank = rng.choice(list(ranks))
        others = [CLIENT, *(member(mesh, other) for other in ranks if other != rank)]
        moment: dict[str, Any] = {"step": 1} if kind == "fail_constructor" else {"time": round(rng.uniform(0, within), 3)}
        values: dict[str, Any] = {name: _draw_value(rng, name, others) for name in KINDS[kind].parameters if name in _DRAWN}
        if kind == "corrupt":
            values["frames"] = 1  # a frame that is bad twice is taken for a bug of the peer, and ends the session
        found.append(Fault.of(kind, mesh=mesh, rank=rank, **moment, **values))
    return found


_DRAWN = {"seconds", "by", "rate", "frames", "bit", "way", "code", "to"}


def _draw_value(rng: random.Random, name: str, others: Sequence[str]) -> Value:
    match name:
        case "seconds":
            return round(rng.uniform(0.05, 0.5), 3)
        case "by":
            return round(rng.uniform(0.001, 0.05), 3)
        case "rate":
            return float(rng.randrange(20_000, 2_000_000))
        case "frames":
            return rng.randrange(1, 4)
        case "bit":
            return rng.randrange(1 << 16)
        case "way":
            return rng.choice(("out", "in"))
        case "code":
            return rng.randrange(1, 128)
        case _:
            return rng.choice(list(others))
