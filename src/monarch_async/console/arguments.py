"""The commands that look into a job, as `argparse` knows them. What they do is in modules that are loaded when one is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["READS", "WRITES", "add_commands", "seconds"]

_LOOKING, _LISTING = "monarch_async.console.looking", "monarch_async.console.listing"

_Add = Callable[[argparse.ArgumentParser], None]


def _target(text: str = "ACTOR", *, optional: bool = False) -> _Add:
    def add(parser: argparse.ArgumentParser) -> None:
        help = "a mesh (trainer), a member (trainer[3]), a process (gpus[3]), a pid"
        parser.add_argument("target", metavar=text, help=help, nargs="?" if optional else None)

    return add


def _targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", metavar="ACTOR", nargs="*", help="only these: meshes (trainer) or members (trainer[3])")


def _top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="seconds between two looks (1)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="so many looks; without a terminal one, else until Ctrl-C")


def _calls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older", type=seconds, default=0.0, metavar="S", help="only those that wait for so many seconds")


def _stack(parser: argparse.ArgumentParser) -> None:
    _target("PROCESS")(parser)
    parser.add_argument("--native", action="store_true", help="with the frames of C code; needs py-spy on that host")


def _logs(parser: argparse.ArgumentParser) -> None:
    _target("PROCESS", optional=True)(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what comes, until the job has ended")
    parser.add_argument("--grep", default="", metavar="REGEX", help="only lines in which this is found")


def _trace(parser: argparse.ArgumentParser) -> None:
    _target()(parser)
    parser.add_argument("--max", type=int, default=10, metavar="N", help="messages to wait for (10)")


def _profile(parser: argparse.ArgumentParser) -> None:
    _target("PROCESS")(parser)
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="S", help="for how long (5)")
    parser.add_argument("--output", "-o", metavar="FILE", help="write a flame graph (SVG) there")


def _eval(parser: argparse.ArgumentParser) -> None:
    _target()(parser)
    parser.add_argument("expression", metavar="EXPRESSION", help="with the actor as self; awaited where it can be")


def _stop(parser: argparse.ArgumentParser) -> None:
    _target()(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="for whoever calls it from now on")
    kinds = ("actors", "processes")
    parser.add_argument("--kind", default="", choices=kinds, help="which are meant, where both have that name")


def _timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the .json to write")
    parser.add_argument("--seconds", type=seconds, default=5.0, metavar="S", help="for how long (5)")


def _bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the .tar.gz to write")


def _nothing(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise ValueError
    return value


seconds.__name__ = "number of seconds"  # for argparse's message

READS: dict[str, tuple[str, _Add]] = {
    "ps": ("the actors, what each is doing, in which process", _targets),
    "procs": ("the processes, their state, memory and processor time", _nothing),
    "tree": ("who owns what, restart policies and what is used of their budgets", _nothing),
    "top": ("messages per second of each actor, cores and memory of its process", _top),
    "calls": ("the calls that wait for an answer: who waits for whom, for how long", _calls),
    "where": ("where an actor's handlers stand, and through whom they wait, over processes", _target()),
    "stack": ("the Python stack of a process, also of a stuck or frozen one", _stack),
    "links": ("the links between processes: what is queued, credit, reconnects", _nothing),
    "deadletters": ("messages that nobody got", _nothing),
    "why": ("what led to the last end of an actor or process", _target()),
    "events": ("failures, ends, restarts, what was changed by hand", _nothing),
    "logs": ("the output of processes", _logs),
    "state": ("the attributes of an actor", _target()),
    "trace": ("the next messages of an actor, with sender, size, duration, outcome", _trace),
    "profile": ("where a process spends its time, as a flame graph", _profile),
    "timeline": ("what all processes do for some seconds, for ui.perfetto.dev", _timeline),
    "bundle": ("all of this in one file for a report, without keys", _bundle),
}
WRITES: dict[str, tuple[str, _Add]] = {
    "stop": ("stop a mesh or an actor (needs --write)", _stop),
    "kill": ("kill a process (needs --write)", _target("PROCESS")),
    "restart": ("end the present life of an actor or process, which its policy starts again (needs --write)", _target()),
    "freeze": ("halt a process (needs --write)", _target("PROCESS")),
    "thaw": ("let it go on (needs --write)", _target("PROCESS")),
    "eval": ("the value of an expression in an actor (needs --write)", _eval),
}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them all. Each sets ``module``, whose ``run(args)`` runs it."""
    for name, (text, add) in {**READS, **WRITES}.items():
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(parser)
        parser.add_argument("--job", "-j", default="", metavar="JOB", help="its name, id, pid or file; not needed where only one runs")
        parser.add_argument("--write", action="store_true", help="be allowed to change the job; each change is logged there")
        parser.add_argument("--patience", type=seconds, default=1.0, metavar="S", help="seconds in which each process is to answer (1)")
        _finish(parser, _LOOKING)
    _finish(commands.add_parser("jobs", help="the jobs of this user", description="The jobs of this user, the newest first."), _LISTING)
    doctor = "what this machine offers to a job, and what to do about what it lacks"
    _finish(commands.add_parser("doctor", help=doctor, description=doctor[0].upper() + doctor[1:] + "."), _LISTING)


def _finish(parser: argparse.ArgumentParser, module: str) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, with names that don't change")
    parser.set_defaults(module=module)
