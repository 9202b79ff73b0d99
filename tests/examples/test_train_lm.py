"""The main example: it learns, its trainers agree, its picture is well-formed, and it ends cleanly whatever happens."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest

from tests.examples.running import EXAMPLES, exits_of_example, run_example, started_example

pytest.importorskip("torch")

SVG = "{http://www.w3.org/2000/svg}"
FELL = re.compile(r"^held-out loss: (\d\.\d+) → (\d\.\d+) nats per character after (\d+) steps in ([\d.]+) s$", re.MULTILINE)


def losses(out: str) -> tuple[float, float]:
    """The first and the last held-out loss that a run reports."""
    found = FELL.search(out)
    assert found is not None, out
    return float(found[1]), float(found[2])


def test_learns_quickly_and_draws_the_curve(tmp_path: Path) -> None:
    """With --quick: the loss begins at guessing and falls, weights stay equal, and both curves are in a well-formed picture."""
    code, out, err = run_example("train_lm.py", "--quick", folder=tmp_path)
    assert (0, "") == (code, err), out
    first, last = losses(out)
    assert 4.56 == pytest.approx(first, abs=0.1)
    assert first - last >= 0.8
    assert "weights: equal on all trainers" in out
    assert "\ndef " in out  # the sample
    picture = ElementTree.parse(tmp_path / "out" / "loss.svg").getroot()
    assert f"{SVG}svg" == picture.tag
    lines = {line.get("class"): (line.get("points") or "").split() for line in picture.iter(f"{SVG}polyline")}
    assert 60 == len(lines["train"])
    assert 13 == len(lines["held"]) == len(list(picture.iter(f"{SVG}circle")))
    texts = {text.text for text in picture.iter(f"{SVG}text")}
    assert {"step", "loss (nats per character)", "training", "held out", "0"} <= texts


@pytest.mark.slow
def test_the_seed_decides_everything(tmp_path: Path) -> None:
    """The same seed gives the same losses, sample and curve; another seed gives others."""

    def report(seed: str) -> tuple[tuple[float, float], str]:
        code, out, _ = run_example("train_lm.py", "--quick", "--seed", seed, "--out", "curve.svg", folder=tmp_path)
        assert 0 == code, out
        picture = ElementTree.parse(tmp_path / "curve.svg").getroot()
        return losses(out), str([line.get("points") for line in picture.iter(f"{SVG}polyline")])

    once, again, other = report("3"), report("3"), report("4")
    assert once == again
    assert once != other


@pytest.mark.slow
def test_three_trainers_agree(tmp_path: Path) -> None:
    """The averaging is written for any number of trainers."""
    code, out, err = run_example("train_lm.py", "--quick", "--steps", "40", "--trainers", "3", folder=tmp_path)
    assert (0, "") == (code, err), out
    assert "weights: equal on all trainers" in out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_full_length(tmp_path: Path) -> None:
    """As a user starts it first: the loss falls by what the documentation states."""
    code, out, err = run_example("train_lm.py", folder=tmp_path, timeout=360)
    assert (0, "") == (code, err), out
    first, last = losses(out)
    assert first - last >= 2.5
    assert (tmp_path / "out" / "loss.svg").exists()


def test_a_missed_target_is_exit_status_1(tmp_path: Path) -> None:
    """Two steps are not enough, and the program says so."""
    code, out, err = run_example("train_lm.py", "--quick", "--steps", "2", folder=tmp_path)
    assert (1, "") == (code, err)
    assert "FAILED: the held-out loss was to fall by 0.8 nats" in out


def children_once_up(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a run, once its trainers are up."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "2 trainers are up" in line:
            children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
            return children
    raise AssertionError(f"it ended before its trainers were up: {''.join(seen)}\n{process.communicate()[1]}")


def test_control_c_ends_it_all(tmp_path: Path) -> None:
    """The interrupt that a terminal sends: status 130, one word on standard error, and no process left."""
    with started_example("train_lm.py", "--quick", "--steps", "1000000", folder=tmp_path) as process:
        children = children_once_up(process)
        assert len(children) >= 4
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (130, "\nstopped\n") == (process.returncode, err)
    assert [] == [child for child in children if child.is_running()]


def test_a_killed_trainer_changes_nothing(tmp_path: Path) -> None:
    """With --kill-one a trainer dies in mid-run, the new one takes over another's state, and the end is the same to the last digit."""
    plain, killed = (run_example("train_lm.py", "--quick", *option, folder=tmp_path) for option in ([], ["--kill-one"]))
    assert (0, "") == (killed[0], killed[2]), killed[1]
    assert re.search(r"trainers\[1\] was lost \(killed by signal 9 \(SIGKILL\)\); all go on from step 3\d", killed[1]), killed[1]
    assert losses(plain[1]) == losses(killed[1])
    assert "weights: equal on all trainers" in killed[1]


@pytest.mark.slow
def test_one_alone_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    """Where nobody has the state of a trainer that dies, its last checkpoint is what it goes on from, to the same end."""
    plain, killed = (run_example("train_lm.py", "--quick", "--trainers", "1", *option, folder=tmp_path) for option in ([], ["--kill-one"]))
    assert (0, "") == (killed[0], killed[2]), killed[1]
    assert "trainers[0] was lost (killed by signal 9 (SIGKILL)); all go on from step 25" in killed[1]
    assert losses(plain[1]) == losses(killed[1])


@pytest.mark.slow
def test_a_killed_loader_ends_it_with_a_reason(tmp_path: Path) -> None:
    """What has no restart policy is named, with the signal, and the program ends with status 1 and leaves no process."""
    with started_example("train_lm.py", "--quick", "--steps", "1000000", folder=tmp_path) as process:
        children = children_once_up(process)
        next(child for child in children if child.name() == "loader-0").kill()
        _, err = process.communicate(timeout=30)
    assert 1 == process.returncode
    assert re.search(r"loader\[0\].*SIGKILL", err), err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert [] == alive


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    """Status 2 and the name of the option, before anything is started."""
    runs = [["--steps", "0"], ["--trainers", "x"], ["--out", "/proc/nowhere/loss.svg"]]
    for arguments, (code, out, err) in zip(runs, exits_of_example("train_lm.py", *runs, folder=tmp_path), strict=True):
        assert (2, "") == (code, out)
        assert arguments[0] in err


def test_missing_torch_says_what_to_install(tmp_path: Path) -> None:
    """Without torch the message is the command that installs it, not a traceback."""
    program = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_path({str(EXAMPLES / 'train_lm.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert 1 == done.returncode
    assert "torch is not installed; in the project's folder: python3 -m pip install torch==2.13.0 -e '.[torch,examples]'\n" == done.stderr


def test_a_title_with_markup_is_escaped(tmp_path: Path) -> None:
    """What a curve is called can't break the picture, and its points lie in the order of the steps, lower for lower losses."""
    write_curve = runpy.run_path(str(EXAMPLES / "lm" / "curve.py"))["write_curve"]
    write_curve(tmp_path / "new" / "curve.svg", "<a> & b", [(1, 4.0), (2, 3.0), (3, 1.0)], [(0, 4.5), (3, 1.5)])
    picture = ElementTree.parse(tmp_path / "new" / "curve.svg").getroot()
    assert "<a> & b" == next(picture.iter(f"{SVG}text")).text
    line = next(line for line in picture.iter(f"{SVG}polyline") if line.get("class") == "train")
    points = [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
    assert sorted(points) == points
    assert sorted(y for _, y in points) == [y for _, y in points]
