"""What is observed from the start: by options, and by the environment."""

from __future__ import annotations

import pytest

from monarch_async._runtime.observing import from_environment
from monarch_async.errors import UsageError
from monarch_async.options import Options, parse_address


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Options()),
        ({"MONARCH_ASYNC_SPANS": "1"}, Options(spans=True)),
        ({"MONARCH_ASYNC_SPANS": "0", "MONARCH_ASYNC_LOG_JSON": "off", "MONARCH_ASYNC_DEBUG": "false"}, Options()),
        ({"MONARCH_ASYNC_DEBUG": "1"}, Options(debug=True)),
        ({"MONARCH_ASYNC_LOG_JSON": "true", "MONARCH_ASYNC_METRICS": "9464"}, Options(log_json=True, metrics="9464")),
    ],
)
def test_the_environment_switches_on(environ: dict[str, str], expected: Options) -> None:
    """What it names, and nothing else."""
    assert expected == from_environment(Options(), environ)


def test_what_the_program_says_goes_first() -> None:
    """An address that was configured stays; one that is none is refused, by the name of the variable."""
    options = Options(metrics="0.0.0.0:1234")
    assert options == from_environment(options, {"MONARCH_ASYNC_METRICS": "9464"})
    with pytest.raises(UsageError, match="MONARCH_ASYNC_METRICS: option 'metrics' must be a port or HOST:PORT, not 'on'"):
        from_environment(Options(), {"MONARCH_ASYNC_METRICS": "on"})


@pytest.mark.parametrize(
    ("text", "expected"), [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("::1:80", ("::1", 80)), ("node:1", ("node", 1))]
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    """A port alone is one of this machine."""
    assert expected == parse_address(text)
    assert text == Options(metrics=text).metrics


@pytest.mark.parametrize("text", ["on", "host:", "1:x", "70000", "-1"])
def test_no_addresses(text: str) -> None:
    """Refused when the option is set."""
    with pytest.raises(ValueError, match="must be a port or HOST:PORT"):
        Options(metrics=text)
