"""``python -m bench.cells`` and its neighbours refuse what cannot be measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import cells, cells_real, policy_hit_ratio

_LINE = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a trace of one request, and one without any."""
    (tmp_path / "one.jsonl").write_text(json.dumps(_LINE) + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("main", "line", "complaint"),
    [
        (cells.main, "--trace {}/missing.jsonl", "cells: cannot read"),
        (cells.main, "--trace {}/empty.jsonl", "empty.jsonl holds no request"),
        (cells.main, "--trace {}/one.jsonl --copies 1", "all come at once"),
        (cells.main, "--trace {}/one.jsonl --cells 0", "--cells '0': wanted positive numbers"),
        (cells.main, "--trace {}/one.jsonl --cells x,2", "--cells 'x,2': wanted positive numbers"),
        (cells.main, "--trace {}/one.jsonl --copies 0", "--copies: '0' is not a whole number"),
        (cells.main, "--family chat --requests 0", "--requests: '0' is not a whole number"),
        (cells_real.main, "--cells 0", "--cells: '0' is not a whole number"),
        (policy_hit_ratio.main, "--trace {}/empty.jsonl", "empty.jsonl holds no request"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    main: Callable[[], None],
    line: str,
    complaint: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2 and one reason, and without a results file."""
    out = folder / "results.json"
    monkeypatch.setattr(sys, "argv", ["bench", *line.format(folder).split(), "--out", str(out)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not out.exists()


def test_one_cell_has_no_aims() -> None:
    """They compare several cells."""
    assert cells.aims([{"way": cells.OURS, "cells": 1}]) == {}
