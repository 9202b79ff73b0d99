"""The metrics that there are: names, kinds, labels, how the values of several processes become one.

Rules: names, labels and units are relied on by dashboards (`tests/observe/families.txt`): none is changed or removed. Times are in seconds,
sizes in bytes. No label names a rank, a process or a pid; those that users' code gives names to are bounded (`SERIES`).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CALL_BOUNDS", "FAMILIES", "LAG_BOUNDS", "OTHER", "SERIES", "Family"]

SERIES = 300
"""Combinations of labels that a process, and the job, tells apart in one metric; the rest is `OTHER`."""
OTHER = "other"

CALL_BOUNDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)
LAG_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class Family(NamedTuple):
    """One metric, `name` without ``monarch_async_``; of a histogram, the upper bounds of its buckets.

    A gauge of the kind ``peak`` is the largest of its values in all processes, any other is their sum.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family("calls_total", "counter", "Messages that actors have handled.", ("actor", "endpoint", "outcome")),
    Family("call_duration_seconds", "histogram", "How long handlers took.", ("actor", "endpoint"), CALL_BOUNDS),
    Family("calls_running", "gauge", "Handlers that run.", ("actor",)),
    Family("actors", "gauge", "Actors by class.", ("actor",)),
    Family("mailbox_messages", "gauge", "Messages that wait in mailboxes.", ("actor",)),
    Family("mailbox_messages_max", "peak", "Messages that wait in the fullest mailbox.", ("actor",)),
    Family("loop_lag_seconds", "histogram", "How late event loops come round.", (), LAG_BOUNDS),
    Family("links", "gauge", "Links that are connected.", ("kind",)),
    Family("link_sent_bytes_total", "counter", "Bytes sent over links.", ("kind",)),
    Family("link_received_bytes_total", "counter", "Bytes received over links.", ("kind",)),
    Family("link_queued_bytes", "gauge", "Bytes that are sent and not acknowledged, or wait to be sent.", ("kind",)),
    Family("link_reconnects_total", "counter", "Connections that were lost and made again.", ("kind",)),
    Family("restarts_total", "counter", "Lives of actors and processes that were started again.", ("reason",)),
    Family("dead_letters_total", "counter", "Messages that nobody got."),
    Family("segment_bytes", "gauge", "Shared memory for what is sent to processes of the same host.", ("state",)),
    Family("collectives_total", "counter", "Collective operations, at each of their ranks.", ("operation", "outcome")),
    Family("collective_duration_seconds", "histogram", "From the call of a collective operation to its end.", ("operation",), CALL_BOUNDS),
    Family("collective_wait_seconds", "histogram", "From the call to the start, when all have called it.", ("operation",), CALL_BOUNDS),
    Family("folded_series", "gauge", "Combinations of labels, in all processes, that are counted as other."),
    Family("processes", "gauge", "Processes by kind and state.", ("kind", "state")),
    Family("resident_bytes", "gauge", "Resident memory of processes, shared pages in each.", ("kind",)),
    Family("unreachable_processes", "gauge", "Processes that did not answer, whose last counts are in the sums."),
    Family("scrape_seconds", "gauge", "How long it took to ask."),
)
