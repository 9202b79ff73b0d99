"""Ours, the raw limit and the peers on the same workloads, in turns; writes a table, the samples and a chart.

    python -m perf.compare                                    ours against the raw limit and the bars
    python -m perf.compare --peer xoscar=X/bin/python …       with peers, each under the interpreter it is installed in
    python -m perf.compare --peers DIR                        the same for DIR/monarch, DIR/ray, DIR/xoscar: virtual environments
    python -m perf.compare --quick                            a short form that shows whether everything runs, not how fast it is

The first stage has no peer beside it; then comes one stage for each peer, so that no peer's background work is charged to another. Within a
stage the systems take turns, workload by workload, many times in each of several rounds. See README.md for what each workload means.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from perf.chart import draw
from perf.report import to_json, to_markdown
from perf.results import Results
from perf.session import Session, WorkerFailed
from perf.table import OURS, RAW, WORKLOADS, Workload

__all__ = ["main", "measure"]

PEERS = {"monarch": "perf.peers.monarch_worker", "ray": "perf.peers.ray_worker", "xoscar": "perf.peers.xoscar_worker"}
MODULES = {RAW: "perf.systems.raw", OURS: "perf.systems.ours", **PEERS}


class Stage:
    """Some systems measured in turns. Each has a worker that lives through the stage, and one of its own for each fresh workload.

    With a peer, only the workloads that the peer has are run. A workload that failed once is not tried again.
    """

    def __init__(self, peer: str, interpreters: dict[str, str], results: Results, procs: int) -> None:
        self._name = peer
        self._interpreters = interpreters
        self._results = results
        self._procs = procs
        self._sessions: dict[str, Session] = {}
        self._failed: set[tuple[str, str]] = set()

    def run(self, workloads: Sequence[Workload], rounds: int, quick: bool) -> None:
        try:
            has = {system: self._session(system).workloads for system in self._interpreters}
            compared = [workload for workload in workloads if not self._name or workload.name in has[self._name]]
            for number in range(rounds):
                for workload in compared:
                    share = (workload.quick if quick else workload.count) // workload.turns
                    for turn, system in product(range(workload.turns), self._interpreters):
                        if workload.name in has[system] and (system, workload.name) not in self._failed:
                            self._measure(system, workload, share, turn)
                print(f"stage {self._name or 'without peers'}: round {number + 1} of {rounds} done", file=sys.stderr)
        except WorkerFailed as error:
            self._note(error)
        finally:
            for session in self._sessions.values():
                session.close()

    def _measure(self, system: str, workload: Workload, count: int, turn: int) -> None:
        try:
            if workload.fresh:
                with self._open(system) as session:
                    samples = session.run(workload.name, count)
            else:
                samples = self._session(system).run(workload.name, count)
        except WorkerFailed as error:
            self._note(error)
            self._failed.add((system, workload.name))
            if not workload.fresh and system in self._sessions:
                self._sessions.pop(system).close()
        else:
            self._results.add(self._name, system, samples, turn=turn)

    def _note(self, error: WorkerFailed) -> None:
        text = f"{self._name or 'without peers'}: {error}"
        print(text, file=sys.stderr)
        self._results.failures.append(text)

    def _session(self, system: str) -> Session:
        if system not in self._sessions:
            self._sessions[system] = self._open(system)
        return self._sessions[system]

    def _open(self, system: str) -> Session:
        session = Session(MODULES[system], self._interpreters[system], self._procs)
        self._results.about["versions"].update(session.versions)
        return session


def measure(workloads: Sequence[Workload], peers: dict[str, str], *, rounds: int, procs: int, quick: bool = False) -> Results:
    """All samples of a run, or, when it is interrupted, those that there are; `peers` maps names to interpreters."""
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rounds": rounds,
        "procs": procs,
        "quick": quick,
        "counts": {workload.name: workload.quick if quick else workload.count for workload in workloads},
        "load": {},
        "versions": {},
    }
    results = Results(about)
    for name in ("", *peers):
        interpreters = {RAW: sys.executable, OURS: sys.executable}
        if name:
            interpreters[name] = peers[name]
        about["load"][name or "without peers"] = round(os.getloadavg()[0], 2)
        try:
            Stage(name, interpreters, results, procs).run(workloads, rounds, quick)
        except KeyboardInterrupt:
            results.failures.append(f"{name or 'without peers'}: interrupted")
            break
    return results


def write(results: Results, folder: Path) -> Iterator[Path]:
    """The report's files; yields their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.md", to_markdown(results)), ("samples.json", to_json(results)), ("chart.svg", draw(results))):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        yield path


def _peers(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, str]:
    found = {}
    if arguments.peers is not None:
        found = {name: str(python) for name in PEERS if (python := arguments.peers / name / "bin" / "python").exists()}
        if not found:
            parser.error(f"--peers: none of {', '.join(PEERS)} is a virtual environment in {arguments.peers}")
    for given in arguments.peer:
        name, _, python = given.partition("=")
        if name not in PEERS or not Path(python).is_file():
            parser.error(f"--peer: {given!r} is not NAME=PYTHON with a name of {', '.join(PEERS)} and the path of an interpreter")
        found[name] = str(Path(python).absolute())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perf.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few iterations and processes, in seconds; its figures mean nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this workload only; may be given several times")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer and the interpreter it is installed in")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with virtual environments named after peers")
    parser.add_argument("--rounds", type=int, help="how often everything is run (3; in the quick form 1)")
    parser.add_argument("--procs", type=int, help="processes of the mesh (8; in the quick form 2)")
    parser.add_argument("--out", type=Path, default=Path("out/perf"), help="where the report is written (out/perf)")
    given = parser.parse_args(arguments)
    known = {workload.name: workload for workload in WORKLOADS}
    if unknown := [name for name in given.only if name not in known]:
        parser.error(f"--only: no workload {', '.join(unknown)}; there are {', '.join(known)}")
    workloads = [known[name] for name in given.only] or [workload for workload in WORKLOADS if workload.quick or not given.quick]
    results = measure(
        workloads,
        _peers(given, parser),
        rounds=given.rounds or (1 if given.quick else 3),
        procs=given.procs or (2 if given.quick else 8),
        quick=given.quick,
    )
    print(to_markdown(results))
    for path in write(results, given.out):
        print(f"wrote {path}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
