"""What an operator is shown of a failed child's log."""

from pathlib import Path

import pytest

from thermocline.supervisor.log_tail import readable, refusal_reason, tail


def test_the_last_lines(tmp_path: Path) -> None:
    """Only the end is read, even of a log far longer than what is read at once."""
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))

    assert tail(log, 2) == "line 49998\nline 49999"


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    """A child that never started has no log."""
    assert tail(tmp_path / "none.log") == ""


def test_the_reason_of_a_refusal() -> None:
    """The last refusal counts, whatever was printed after it."""
    text = '{"event": "refused_to_start", "reason": "old"}\n{"event": "refused_to_start", "reason": "no model"}\nnoise'

    assert refusal_reason(text) == "no model"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("thermocline worker: error: unrecognized arguments: --x", "unrecognized arguments: --x"),
        ("gateway: --port: 'x' is no number", "--port: 'x' is no number"),
        ("thermocline worker: --model is required", "--model is required"),
    ],
)
def test_the_reason_of_a_bad_command_line(line: str, reason: str) -> None:
    """What a service or argparse prints before there is a log is a reason too."""
    assert refusal_reason(f"usage: thermocline worker [-h]\n{line}") == reason


def test_no_reason_is_none() -> None:
    """A log without a refusal yields none."""
    assert refusal_reason('{"event": "started"}\n[1, 2]\n') is None


def test_events_are_shown_in_words() -> None:
    """A JSON event reads as a sentence would, and its exception has its lines back."""
    line = (
        '{"component": "worker", "seq": 2, "event": "died", "level": "error", "exception": "Traceback\\nValueError: x"}'
    )

    assert readable(line) == "error died seq=2\nTraceback\nValueError: x"


@pytest.mark.parametrize("line", ["plain text", "[1]", '{"no": "event"}', ""])
def test_other_lines_are_shown_as_they_are(line: str) -> None:
    """Whatever is no event is left alone."""
    assert readable(line) == line
