"""The rules of the Trace Event format that a viewer relies on."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

__all__ = ["names_of", "wrong_in"]

_NUMBER = (int, float)


def wrong_in(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace; what is right says nothing."""
    json.dumps(trace, allow_nan=False)
    wrong: list[str] = []
    events = trace["traceEvents"]
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            named[event["name"]].add(event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"]))
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] not in "XsfCiM":
            wrong.append(f"unknown phase {event}")
        if not isinstance(event["ts"], _NUMBER) or event["ts"] < 0 or not isinstance(event["pid"], int) or not event["name"]:
            wrong.append(f"bad time, pid or name: {event}")
        if event["ph"] == "M":
            continue
        if event["pid"] not in named["process_name"] or (event["pid"], event["tid"]) not in named["thread_name"]:
            wrong.append(f"no name for the process or thread of {event}")
        if event["ph"] == "X" and not (isinstance(event.get("dur"), _NUMBER) and event["dur"] >= 0):
            wrong.append(f"no duration: {event}")
        if event["ph"] == "C" and not all(isinstance(value, _NUMBER) for value in event["args"].values()):
            wrong.append(f"a counter that is no number: {event}")
        if event["ph"] == "i" and event.get("s") not in ("g", "p", "t"):
            wrong.append(f"no scope: {event}")
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        wrong += _wrong_in_track(track)
    for flow in flows.values():
        if ["f", "s"] != sorted(end["ph"] for end in flow):
            wrong.append(f"a flow without both of its ends: {flow}")
            continue
        start, finish = sorted(flow, key=lambda end: "sf".index(end["ph"]))
        if finish["ts"] < start["ts"] or finish.get("bp") != "e" or (start["cat"], start["name"]) != (finish["cat"], finish["name"]):
            wrong.append(f"a flow whose ends don't fit: {flow}")
        for end in flow:
            if not any(_within(end, slice) for slice in tracks[end["pid"], end["tid"]] if slice["ph"] == "X"):
                wrong.append(f"an end of a flow in no slice: {end}")
    return wrong


def _wrong_in_track(track: list[dict[str, Any]]) -> list[str]:
    wrong = [f"times go back: {after}" for before, after in itertools.pairwise(track) if after["ts"] < before["ts"]]
    open_until: list[float] = []
    for event in track:
        if event["ph"] == "X":
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            end = event["ts"] + event["dur"]
            if open_until and end > open_until[-1] + 1e-6:
                wrong.append(f"slices overlap: {event}")
            open_until.append(end)
    return wrong


def _within(end: dict[str, Any], slice: dict[str, Any]) -> bool:
    return bool(slice["ts"] - 1e-6 <= end["ts"] <= slice["ts"] + slice["dur"] + 1e-6)


def names_of(trace: dict[str, Any], kind: str) -> dict[Any, str]:
    """The names of processes (by pid) or threads (by pid and tid)."""
    return {
        event["pid"] if kind == "process_name" else (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == kind
    }
