"""Seeing into a live job: who there is, what each is doing, who waits for whom, and why something ended.

    from monarch_async.observe.job import Job, attach

    job = Job.here()                            # the job that this program runs
    async with attach("train") as job:          # one that runs already, from another process
        for row in await job.ps():
            print(row.actor, row.state, row.endpoint)

* `job` is what users call, `records` what they get, `errors` what can go wrong.
* `inside` is the part that runs in the processes of a job. It is loaded there when somebody first looks, so that nobody pays for it else.
* `doctor` looks at this machine, `bundle` packs everything for a report, `timeline` draws what a job has done.
* `metrics` serves figures to Prometheus, `spans` joins in OpenTelemetry's traces, `json_lines` logs as JSON: ``observe.serve_metrics()``,
  ``observe.json_logging()``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_async.observe.job import Job, attach
    from monarch_async.observe.json_lines import json_logging
    from monarch_async.observe.metrics.serving import serve_metrics

__all__ = ["Job", "attach", "json_logging", "serve_metrics"]

_HOME = {"Job": "job", "attach": "job", "json_logging": "json_lines", "serve_metrics": "metrics.serving"}


if not TYPE_CHECKING:  # as in the package's own

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
