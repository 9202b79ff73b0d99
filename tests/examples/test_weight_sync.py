"""The example of weights on their way: it learns, every version that is pulled is whole, and it ends cleanly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import exits_of_example, run_example

pytest.importorskip("torch")


def test_versions_arrive_whole(tmp_path: Path) -> None:
    """A small run: the loss falls, both generators pull, nothing is torn, and nothing is said on standard error."""
    arguments = ["--steps", "24", "--every", "3", "--generators", "2", "--width", "32"]
    code, out, err = run_example("weight_sync.py", *arguments, folder=tmp_path, timeout=110)
    assert (0, "") == (code, err), out
    loss = re.search(r"^trained 24 steps in .* s, loss (\d\.\d+) → (\d\.\d+) nats", out, re.MULTILINE)
    assert loss is not None, out
    assert float(loss[2]) < float(loss[1])
    assert re.search(r"^published 8 versions of 0\.\d MB: .* a second, .* ms each$", out, re.MULTILINE), out
    pulled = re.search(r"^2 generators pulled (\d+) times: .* ms each, .* MB/s in all$", out, re.MULTILINE)
    assert pulled is not None, out
    assert 2 <= int(pulled[1]) <= 2 * 9
    assert re.search(r"^staleness: \d\.\d\d versions; pieces of text written: \d+$", out, re.MULTILINE), out
    assert "\ntorn versions: 0\n" in out
    assert "\ndef " in out


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    """Status 2 and the name of the option, before anything is started."""
    runs = [["--steps", "0"], ["--every", "500"], ["--width", "33"]]
    for arguments, (code, out, err) in zip(runs, exits_of_example("weight_sync.py", *runs, folder=tmp_path), strict=True):
        assert (2, "") == (code, out)
        assert arguments[0] in err
