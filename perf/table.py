"""What is measured and what is demanded, as data: the workloads with their iterations, the metrics with their units, the bars.

A workload is run by name in each system's worker (`worker.py`) and gives samples of one or more metrics. A bar is a demand on one metric of
ours: on its own, or against a metric of another system taken in the same rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perf.stats import Relation, Statistic

__all__ = ["BARS", "METRICS", "OURS", "RAW", "WORKLOADS", "Bar", "Metric", "Unit", "Workload"]

OURS, RAW = "ours", "raw"
Unit = Literal["s", "/s", "B", "B/s"]


@dataclass(frozen=True, slots=True)
class Workload:
    """`name` is what the worker is asked for. `count` iterations a round; `quick` in the quick form, 0: not run there.

    In a round the systems take `turns` turns, each with its share of the iterations. A `fresh` workload gets a worker of its own each time.
    """

    name: str
    count: int
    quick: int
    turns: int = 1
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the report. `title` is what it shows, `unit` that of its samples, `statistic` what stands for a round."""

    name: str
    title: str
    unit: Unit
    statistic: Statistic = "median"


@dataclass(frozen=True, slots=True)
class Bar:
    """Ours must be at most (``≤``) or at least (``≥``) `figure`: as such, or that many times or that much above `reference`.

    `reference` is a system and one of its metrics. `pooled` judges a statistic of all samples of the run, not round by round.
    """

    metric: str
    sense: Literal["≤", "≥"]
    figure: float
    relation: Relation | None = None
    reference: tuple[str, str] | None = None
    statistic: Statistic | None = None
    pooled: bool = False


WORKLOADS = (
    Workload("call", 2400, 200, turns=8),
    Workload("actor_to_actor", 2400, 200, turns=8),
    Workload("call_def", 1200, 100, turns=8),
    Workload("local", 2400, 500, turns=4),
    Workload("pipelined", 40_000, 2000, turns=4),
    Workload("broadcast", 100_000, 5000, turns=4),
    Workload("mesh", 400, 50, turns=4),
    Workload("payload", 10, 3),
    Workload("tensors", 10, 0),
    Workload("kill", 35, 3),
    Workload("start", 1, 1, fresh=True),
    Workload("many", 10_000, 500, fresh=True),
    Workload("idle", 1, 1, fresh=True),
    Workload("start_torch", 1, 0, fresh=True),
    Workload("import_torch", 1, 0),
    Workload("start_interpreter", 10, 3),
    Workload("import_library", 10, 3),
)
"""Pairs that are compared stand next to each other."""

METRICS = {
    metric.name: metric
    for metric in (
        Metric("call", "one awaited call to a process", "s"),
        Metric("actor_to_actor", "one awaited call from actor to actor", "s"),
        Metric("call_def", "call to a `def` endpoint", "s"),
        Metric("local", "call inside one process, immutable arguments", "s"),
        Metric("mesh", "call on the whole mesh", "s"),
        Metric("pipelined", "pipelined calls to one actor", "/s"),
        Metric("broadcast", "broadcasts to one actor, handled", "/s"),
        Metric("broadcast_awaited", "the same, each awaited", "/s"),
        Metric("start_cold", "processes started and answering, cold client", "s"),
        Metric("start_more", "as many more processes", "s"),
        Metric("start_torch", "processes with torch preloaded, cold client", "s"),
        Metric("import_torch", "one import of torch", "s"),
        Metric("many_seconds", "many actors in one process, spawned and answering", "s"),
        Metric("many_bytes", "growth of that process per actor (private pages)", "B"),
        Metric("many_rss", "the same, resident", "B"),
        Metric("idle_pss", "proportional memory of an idle process", "B"),
        Metric("idle_uss", "private memory of an idle process", "B"),
        Metric("kill", "SIGKILL of a process to its pending call's error", "s"),
        Metric("start_interpreter", "a bare interpreter, start to end", "s"),
        Metric("import_library", "the same with `import monarch_async`", "s"),
        Metric("import_names", "the same with Actor, endpoint and this_host loaded", "s"),
        Metric("array_1m", "1 MiB NumPy array to an actor", "B/s"),
        Metric("array_64m", "64 MiB NumPy array to an actor", "B/s"),
        Metric("tensor_1m", "1 MiB tensor to an actor", "B/s"),
        Metric("tensor_64m", "64 MiB tensor to an actor", "B/s"),
        Metric("memcpy", "memcpy of 64 MiB", "B/s"),
    )
}

BARS = (
    Bar("call", "≤", 1.5, "times", (RAW, "call")),
    Bar("actor_to_actor", "≤", 1.5, "times", (RAW, "actor_to_actor")),
    Bar("call_def", "≤", 2.5, "times", (RAW, "call_def")),
    Bar("local", "≤", 30e-6),
    Bar("pipelined", "≥", 50_000),
    Bar("pipelined", "≥", 0.4, "times", (RAW, "pipelined")),
    Bar("broadcast", "≥", 150_000),
    Bar("mesh", "≤", 0.35, "times", ("xoscar", "mesh")),
    Bar("start_cold", "≤", 0.4),
    Bar("start_more", "≤", 0.15),
    Bar("start_torch", "≤", 0.3, "above", (RAW, "import_torch")),
    Bar("many_seconds", "≤", 1.0),
    Bar("many_bytes", "≤", 10_000),
    Bar("idle_pss", "≤", 10e6),
    Bar("kill", "≤", 20e-3, statistic="p99", pooled=True),
    Bar("import_library", "≤", 0.1, "above", (RAW, "start_interpreter")),
    Bar("import_names", "≤", 0.1, "above", (RAW, "start_interpreter")),
)
