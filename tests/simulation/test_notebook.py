"""The notebook in ``examples/`` runs as it stands, without a network, and ends in pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/hit_ratio_over_capacity.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """What its cells print and draw, a line of JSON each."""
    command = [sys.executable, "-m", "tests.notebook_cells", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)


def test_it_goes_from_a_trace_to_hit_ratio_over_capacity() -> None:
    """Facts of the trace, an import without its text, a row per simulation, two pictures with a line per policy."""
    done = run(NOTEBOOK)
    assert done.returncode == 0, done.stderr

    facts, imported, rows, hits, ttft = map(json.loads, done.stdout.splitlines())
    assert facts["printed"].startswith("1,000 requests in 18 minutes")
    assert "harbour" not in imported["printed"]
    assert "2 requests, 0 malformed lines" in imported["printed"]
    assert len(rows["printed"].splitlines()) == 9
    for cell, title in ((hits, "hit tokens / prompt tokens"), (ttft, "TTFT, mean, ms")):
        picture = ET.fromstring(cell["picture"])
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
        assert title in cell["picture"]


def test_it_is_committed_without_outputs() -> None:
    """They would be those of an earlier version; each cell has the name that the format asks for."""
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert sum(len(cell["source"]) for cell in CELLS) < 120


@pytest.mark.parametrize("line", ["socket.create_connection(('127.0.0.1', 9))", "socket.getaddrinfo('localhost', 80)"])
def test_a_cell_that_asks_a_network_fails(line: str, tmp_path: Path) -> None:
    """Or the test above would show nothing of that."""
    path = tmp_path / "asks.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [f"import socket\n{line}"]}]}))

    done = run(path)
    assert done.returncode == 1
    assert "a notebook needs no network" in done.stderr
