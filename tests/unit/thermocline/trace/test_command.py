"""``thermocline trace`` as a command: its verbs, and how it refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thermocline.__main__ import main


def test_a_verb_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A file alone says which there are."""
    with pytest.raises(SystemExit) as refused:
        main(["trace", "trace.jsonl"])

    assert refused.value.code == 2
    assert "choose from" in (complaint := capsys.readouterr().err)
    assert "send" in complaint
    assert "import" in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "cannot read /nowhere"),
        (["{trace}", "--requests", "0"], "at least 1"),
        (["{trace}", "--length-scale", "0"], "scales must be above 0"),
    ],
)
def test_what_cannot_be_sent_exits_with_two(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")

    assert main(["trace", "send", *(argument.format(trace=trace) for argument in arguments)]) == 2
    assert complaint in capsys.readouterr().out.replace("\n", " ")
