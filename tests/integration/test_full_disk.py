"""A cell whose data folder is on a full disk: it says so, serves again as soon as there is room, and stops cleanly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.lifecycle import EXIT_REFUSED
from tests.integration.test_up import SMALL, ask
from tests.small_disk import fill, small_disk
from tests.waiting import holds, is_ready
from thermocline.supervisor.api import running
from thermocline.supervisor.records import runs_dir

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_a_cell_outlives_a_full_disk(tmp_path: Path) -> None:
    """The broker's streams cannot be written even when there is room again, until it is restarted.

    A worker that dies meanwhile comes back, though its death cannot be written down.
    """
    with (
        small_disk(tmp_path) as disk,
        running(msgspec.structs.replace(SMALL, data_dir=str(disk))) as cell,
    ):
        answer = ask(cell)
        filler = fill(disk)
        killed = cell.kill("worker-0")
        assert holds(lambda: "no room in" in cell.output, timeout_s=120)
        assert holds(lambda: cell.children()["worker-0"].pid != killed, timeout_s=120)
        filler.unlink()
        assert holds(lambda: "the broker stores messages again" in cell.output, timeout_s=120)
        assert holds(lambda: is_ready(cell.base_url), timeout_s=120)

        assert ask(cell) == answer
        assert cell.stop() == 0
        assert list(runs_dir().glob("tc-*")) == []


def test_a_start_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    """Before anything is started, with the flag and figures."""
    with small_disk(tmp_path) as disk:
        fill(disk)
        command = [sys.executable, "-m", "thermocline", "up", "--port", "0", "--data-dir", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)

        assert done.returncode == EXIT_REFUSED
        assert re.search(rf"--data-dir {disk}: the disk is full \([\d,]+ bytes are free", done.stderr), done.stderr
        assert "Traceback" not in done.stderr
        assert [path.name for path in disk.iterdir()] == ["filler"]
