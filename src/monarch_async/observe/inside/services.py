"""The functions behind the doors of a process, by name: `READS` look, `WRITES` change something.

Each names its module here, which is loaded when it is first asked for: a process is held up while it loads something.

Rules:

* A read takes the runtime and plain values, and returns what can be pickled by name; it is bounded, and leaves nothing behind that it does
  not remove by itself when nobody asks any more.
* A write takes the runtime, who asks, and what it is about, for people; then what it needs.
* Here is only what can be known or done in this very process: to put it together is for `job`.
"""

from __future__ import annotations

__all__ = ["READS", "WRITES"]

READS: dict[str, str] = {
    "calls": "waiting.calls",
    "cells": "cells.cells",
    "clock": "recording.clock",
    "counts": "counting.counts",
    "ends": "cells.ends",
    "events": "cells.events",
    "handlers": "waiting.handlers",
    "known_agents": "cells.known_agents",
    "links": "cells.links",
    "letters": "cells.letters",
    "last_output": "printing.last_output",
    "metrics": "metering.metrics",
    "output": "printing.output",
    "owned": "cells.owned",
    "procs": "host.procs",
    "profile": "host.profile",
    "record": "recording.record",
    "reference": "cells.reference",
    "roster": "host.roster",
    "self": "cells.itself",
    "stack": "host.stack",
    "stack_here": "waiting.stack_here",
    "state": "acting.state",
    "stops": "debugging.stops",
    "trace": "tracing.trace",
    "wards": "cells.wards",
}

WRITES: dict[str, str] = {
    "eval": "acting.evaluate",
    "freeze": "host.freeze",
    "kill": "host.kill",
    "pdb_command": "debugging.pdb_command",
    "restart": "acting.restart",
    "restart_proc": "host.restart",
    "thaw": "host.thaw",
    "stop_member": "acting.stop_member",
    "stop_mesh": "acting.stop_mesh",
    "stop_next": "debugging.stop_next",
}
