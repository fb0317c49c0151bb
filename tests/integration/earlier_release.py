"""Processes of an earlier release, from the sources that the checkout's history holds, beside those of today."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thermocline.supervisor.api import RunningCell

COMMIT = "995b30ed126814a9dab1f51b98936692c29eb38f"
"""The last commit of release 0.1.0."""
TREE = "bd78d6b1a2f2d42c15128d143101e6a0d6af4c95"
"""Its tree, whose name is a digest of every file."""

_ROOT = Path(__file__).parents[2]
_PARTS = ("pyproject.toml", "services", "shared", "thermocline", "tools")


class NoHistory(Exception):
    """The earlier sources cannot be had here; the message says why."""


def unpack(folder: Path) -> Path:
    """Write the earlier release's sources into ``folder``, which is returned. Raises NoHistory."""
    if _git("rev-parse", "--verify", f"{COMMIT}^{{tree}}").decode().strip() != TREE:
        raise NoHistory(f"commit {COMMIT} has another tree than release 0.1.0")
    with tarfile.open(fileobj=io.BytesIO(_git("archive", COMMIT, *_PARTS))) as archive:
        # Python before 3.11.4 has no filters; the archive is our own.
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **options)
    return folder


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", _ROOT, *arguments], capture_output=True, timeout=60, check=False)
    except OSError as error:
        raise NoHistory(f"git cannot be run: {error.strerror}") from error
    if done.returncode:
        raise NoHistory(f"no history of release 0.1.0 here: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


class EarlierRelease:
    """Commands of the sources in ``root``, run by this interpreter."""

    def __init__(self, root: Path) -> None:
        self._command = [sys.executable, "-P", "-m", "thermocline"]
        earlier = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, (str(root), earlier)))
        self._environ = {**os.environ, "PYTHONPATH": path, "THERMOCLINE_SUPERVISED": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [*self._command, *arguments], env=self._environ, capture_output=True, text=True, timeout=120, check=False
        )

    def formats(self) -> dict[str, Any]:
        """Versions of its formats by name."""
        formats: dict[str, Any] = json.loads(self.run("version", "--json").stdout)["formats"]
        return formats

    @contextmanager
    def up(self, *flags: str) -> Iterator[RunningCell]:
        """``thermocline up`` for the duration of the block, which is entered once it can serve."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [*self._command, "up", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                process_group=0,
            )
            cell = RunningCell(process, output)
            try:
                cell.wait_ready()
                yield cell
            finally:
                cell.stop()
