"""The benchmarks run and say what they measured. No test here looks at how long anything took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perf.compare import main
from perf.table import BARS, METRICS, RAW, WORKLOADS

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_the_quick_form_measures_what_it_promises(tmp_path: Path) -> None:
    """Run as its users run it, the quick form ends well, has samples of ours for every bar it can judge, and writes report and chart."""
    command = [sys.executable, "perf/compare.py", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert 0 == run.returncode, run.stderr
    content = json.loads((tmp_path / "samples.json").read_text())
    assert [] == content["failures"]
    ours, raw = (content["stages"][""][name] for name in ("ours", "raw"))
    for rounds in [*ours.values(), *raw.values()]:
        assert 1 == len(rounds), "one round, however many turns"
        assert all(sample > 0 for sample in rounds[0])
    counts = {workload.name: workload.quick for workload in WORKLOADS}
    assert counts["call"] == len(ours["call"][0]) == len(raw["call"][0])
    assert counts["kill"] == len(ours["kill"][0])
    left_out = {"start_torch", "mesh"}  # torch takes too long, and the mesh is judged against a peer
    judged = {verdict["metric"] for verdict in content["verdicts"] if verdict["met"] is not None}
    assert {bar.metric for bar in BARS} - left_out == judged
    report = (tmp_path / "report.md").read_text()
    assert run.stdout.rstrip() == report.rstrip()
    for name in (set(ours) | set(raw)) & set(METRICS):
        assert f"| {METRICS[name].title} |" in report
    chart = ElementTree.parse(tmp_path / "chart.svg").getroot()
    texts = {element.text for element in chart.iter(f"{SVG}text")}
    assert METRICS["call"].title in texts


@pytest.mark.slow
def test_one_workload_alone(tmp_path: Path) -> None:
    """`--only` runs the workload it names and nothing else."""
    assert 0 == main(["--quick", "--only", "import_library", "--only", "start_interpreter", "--out", str(tmp_path)])
    stage = json.loads((tmp_path / "samples.json").read_text())["stages"][""]
    assert {"ours": {"import_library", "import_names"}, "raw": {"start_interpreter"}} == {
        system: set(metrics) for system, metrics in stage.items()
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "nothing"], "--only: no workload nothing; there are call, "),
        (["--peer", "erlang=/bin/sh"], "--peer: 'erlang=/bin/sh' is not NAME=PYTHON"),
        (["--peer", "ray=nowhere/python"], "--peer: 'ray=nowhere/python' is not NAME=PYTHON"),
        (["--peers", "nowhere"], "--peers: none of monarch, ray, xoscar is a virtual environment in nowhere"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured for names that don't exist, and the message says which do."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert 2 == caught.value.code
    assert told in capsys.readouterr().err


def test_the_table_is_whole() -> None:
    """Each bar is a demand on a metric that exists, and each metric of the raw limit that a bar refers to exists too."""
    for bar in BARS:
        assert bar.metric in METRICS
        assert (bar.relation is None) == (bar.reference is None)
        if bar.reference is not None:
            system, metric = bar.reference
            assert system in (RAW, "xoscar")
            assert metric in METRICS
