"""Every small example runs as it stands, says what it promises, and says nothing on standard error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_example

PROMISED = {
    "ping_pong.py": [r"pair 0: pong hit the ball 2000 times, it was touched 4000 times", r"4000 round trips in .* s: [\d,]+ a second"],
    "philosophers.py": [*(rf"philosopher {seat} ate 50 times" for seat in range(4)), "nobody starved"],
    "parameter_server.py": [r"2 workers pushed 600 gradients", r"largest error of a weight: \d\.\d+ → 0\.00\d+"],
    "stream_results.py": [r"after +\d+ ms: counter \d has read 30 files", r"[\d,]+ words in 90 files; most often: \w+"],
    "sync_script.py": ["counter 1 is at 15", "a hundred calls later: 115", r"after four threads: \[5065, 4965\]"],
}


def test_every_example_is_run() -> None:
    """No example is left without a test: some have modules of their own, the others are listed here."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PROMISED, "ddp_digits.py", "stuck.py", "train_lm.py", "weight_sync.py"}


@pytest.mark.parametrize("name", PROMISED)
def test_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    """Exit status 0, the promised lines, no warning and no traceback; and the documentation says how to start it."""
    code, out, err = run_example(name, folder=tmp_path)
    assert (0, "") == (code, err), out
    for line in PROMISED[name]:
        assert re.search(f"^{line}", out, re.MULTILINE), f"{line!r} is missing in\n{out}"
    assert f"python examples/{name}\n" in (EXAMPLES / name).read_text()


def test_results_are_streamed_in_order_of_arrival(tmp_path: Path) -> None:
    """Each of the three counters answers once, at times that never go back, and their words add up to the total."""
    _, out, _ = run_example("stream_results.py", folder=tmp_path)
    arrived = re.findall(r"after +(\d+) ms: counter (\d) has read \d+ files, ([\d,]+) words", out)
    times = [int(time) for time, _, _ in arrived]
    assert ["0", "1", "2"] == sorted(rank for _, rank, _ in arrived)
    assert sorted(times) == times
    total = re.search(r"^([\d,]+) words in 90 files", out, re.MULTILINE)
    assert total is not None
    assert int(total[1].replace(",", "")) == sum(int(words.replace(",", "")) for _, _, words in arrived)


def test_two_philosophers_share_both_forks(tmp_path: Path) -> None:
    """The tightest table: both need the same two forks, and both eat their fill."""
    code, out, err = run_example("philosophers.py", "--seats", "2", "--meals", "100", folder=tmp_path)
    assert (0, "") == (code, err)
    assert ["philosopher 0 ate 100 times", "philosopher 1 ate 100 times", "nobody starved"] == out.splitlines()


def test_a_lonely_philosopher_is_refused(tmp_path: Path) -> None:
    """A wrong argument is a usage error, with the reason."""
    code, _, err = run_example("philosophers.py", "--seats", "1", folder=tmp_path)
    assert 2 == code
    assert "at least 2 seats" in err
