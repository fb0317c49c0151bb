"""``thermocline eval`` on the bundled model, with few questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.model_files import fingerprint
from shared.quality_gate import read_gate
from thermocline.evaluation.__main__ import main

MODEL = Path(__file__).parents[4] / "models" / "thermocline-mha"
QUICK = (
    *("--model", str(MODEL), "--threads", "1", "--questions", "24", "--document-tokens", "300"),
    *("--ratios", "0.5,0.05", "--methods", "importance:h2o_pooled,random"),
)


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*QUICK, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    methods = [{**one, "seconds": 0} for one in found["methods"]]
    return {**found, "seconds": 0, "methods": methods}


def test_what_matters_keeps_answers_right_and_chance_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Half of the prefix, chosen, keeps what the whole has; a twentieth at random keeps nothing.

    The saved task gives the figures of the generated one, in every digit but the seconds.
    """
    path = tmp_path / "task.json"
    found = figures(capsys, "--save-task", str(path))

    by_name = {(one["method"], one["ratio"]): one["accuracy"] for one in found["methods"]}
    assert found["accuracy"] > 0.85
    assert by_name["importance:h2o_pooled", 0.5] > 0.8
    assert by_name["random", 0.05] < 0.3
    assert found["deviation_nats"] < 1e-3
    assert without_times(figures(capsys, "--task", str(path))) == without_times(found)


def test_the_gate_passes_what_is_within_the_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A generous limit lets the chosen half through, a twentieth at random through none; the file says both."""
    gate = tmp_path / "gate.json"
    limit = ("--max-drop", "40", "--gate", str(gate), "--gate-method")

    passed = main([*QUICK, *limit, "importance:h2o_pooled", "--ratios", "0.5"])
    good = read_gate(gate)
    failed = main([*QUICK, *limit, "random"])
    bad = read_gate(gate)

    assert (passed, failed) == (0, 1)
    assert "random at ratio 0.05 drops" in capsys.readouterr().err
    assert (good.model, good.least_ratio) == (fingerprint(MODEL), 0.5)
    assert bad.ratios[-1].passed is False


def test_kv_of_eight_bits_is_judged_over_whole_prefixes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The gate is of the model with such KV, and of nothing that parts of prefixes have."""
    gate = tmp_path / "gate.json"
    line = ["--model", str(MODEL), "--threads", "1", "--questions", "24", "--document-tokens", "300"]

    assert main([*line, "--json", "--kv-dtype", "fp8", "--max-drop", "10", "--gate", str(gate)]) == 0

    found = json.loads(capsys.readouterr().out)
    (figure,) = found["methods"]
    assert (figure["method"], figure["ratio"], figure["read"]) == ("kv_fp8", 1.0, 1.0)
    assert 0.0 < abs(figure["nats_lost"]) < 0.2
    assert found["deviation_nats"] < 0.05
    measured = read_gate(gate)
    assert (measured.method, measured.model) == ("kv_fp8", fingerprint(MODEL, kv_dtype="fp8"))
    assert [one.passed for one in measured.ratios] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "no-such-task.json"], "cannot read the task"),
        (["--methods", "best"], "no method 'best'"),
        (["--kv-dtype", "fp8"], "compares whole prefixes, and --methods, --ratios are of parts"),
        (["--ratios", "half"], "must be numbers"),
        (["--ratios", "0"], "above 0"),
        (["--ratios", "0.5,0.5"], "given twice"),
        (["--gate", "gate.json"], "--gate needs --max-drop"),
        (["--max-drop", "1"], "--gate-method importance is not among"),
        (["--methods", "static", "--limit", "1"], "single question"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--document-tokens", "4300"], "does not fit a context of 4096"),
    ],
)
def test_a_line_that_makes_no_sense_is_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the reason on standard error, nothing on standard output."""
    assert main([*QUICK, *arguments]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize("flag", ["--max-drop", "--alpha"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "-inf", "a lot"])
def test_a_number_that_is_no_limit_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before the model is loaded; no file is written."""
    gate = tmp_path / "gate.json"

    with pytest.raises(SystemExit) as ended:
        main([*QUICK, "--max-drop", "1", "--gate-method", "random", "--gate", str(gate), f"{flag}={value}"])

    assert ended.value.code == 2
    assert f"'{value}' is not a number" in capsys.readouterr().err
    assert not gate.exists()
