"""``thermocline trace`` as a command: its verbs, and how it refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thermocline.__main__ import main


def test_a_verb_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is neither a verb nor a file says which there are."""
    with pytest.raises(SystemExit) as refused:
        main(["trace", "sent"])

    assert refused.value.code == 2
    assert "'sent' is none of import, send; did you mean send?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "cannot read /nowhere: No such file or directory"),
        (["{trace}", "--requests", "0"], "--requests: '0' is not a whole number from 1"),
        (["{trace}", "--length-scale", "0"], "--length-scale: '0' is not a number above 0"),
    ],
)
def test_what_cannot_be_sent_exits_with_two(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")

    try:
        code = main(["trace", "send", *(argument.format(trace=trace) for argument in arguments)])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]

    told = capsys.readouterr().err
    assert code == 2
    assert complaint in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("is_flag_first", [False, True])
def test_the_line_of_the_last_release_sends(
    is_flag_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how it is written now; an empty trace ends it before it asks a cell."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    line = [str(trace), "--requests", "3"]

    assert main(["trace", *(line[1:] + line[:1] if is_flag_first else line)]) == 2

    captured = capsys.readouterr()
    assert "trace FILE is called trace send FILE now" in captured.err
    assert "holds no request" in captured.err
