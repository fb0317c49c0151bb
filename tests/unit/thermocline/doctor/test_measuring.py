"""A process that measures says what it is at, answers in its last line, and never outlives its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from thermocline.doctor.measuring import run_measurement


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that runs the Python that it is given."""
    (tmp_path / "measures_as_told.py").write_text("import sys; exec(sys.argv[1])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "measures_as_told"


def test_the_last_line_is_the_answer(module: str) -> None:
    """Those before it are handed on in order."""
    said: list[str] = []

    answer = run_measurement(module, ["print('one'); print('two'); print('{}')"], said.append)

    assert (answer, said) == ("{}", ["one", "two"])


def test_a_failure_is_told_in_its_own_words(module: str) -> None:
    """The last line of its errors, or the code that it ended with."""
    with pytest.raises(ConfigError, match="measuring failed: no room"):
        run_measurement(module, ["print('{}'); sys.exit('first\\nno room')"], lambda line: None)
    with pytest.raises(ConfigError, match="measuring failed: exit code 3"):
        run_measurement(module, ["sys.exit(3)"], lambda line: None)


def test_what_takes_too_long_is_ended(module: str) -> None:
    """With advice."""
    with pytest.raises(ConfigError, match="took more than 1 s"):
        run_measurement(module, ["import threading; threading.Event().wait(600)"], lambda line: None, limit_s=0.6)
