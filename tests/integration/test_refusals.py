"""What ``thermocline up`` refuses over its real command line: all faults at once, exit code 2, nothing started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline.supervisor.records import runs_dir

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def file_with(path: Path, text: str) -> str:
    """A file of this text that only its owner may read."""
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def run_up(data_dir: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """``thermocline up`` that is expected to refuse."""
    return subprocess.run(
        [sys.executable, "-m", "thermocline", "up", "--port", "0", "--data-dir", str(data_dir), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, **environ},
    )


def test_wrong_settings_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    """Each with what may stand there. No folder is made, so no process of the cell has been started either.

    Which settings are wrong is in ``tests/unit/thermocline/supervisor/test_preflight.py``.
    """
    settings, other = file_with(tmp_path / "cell.toml", "[worker]\nmover = 'x'\n"), file_with(tmp_path / "file", "{}")
    wrong = [
        (("--policy", "thermoclin"), "2q, arc, fifo, .* did you mean thermocline"),
        (("--device", "gpu"), "--device: 'gpu' is none of .*cpu, cuda"),
        (("--dtype", "float7"), "auto, float32, bfloat16, float16; did you mean float32"),
        (("--hidden-form", "most"), "write off, auto, or numbers of layers"),
        (("--restoring", "plan"), "planned, kv, hidden, recompute, important; did you mean planned"),
        (("--page-size", "4096"), "--page-size"),
        (("--tensor-parallel", "4"), "--tensor-parallel 4: .* 6 attention heads"),
        (("--remote", "ftp://bucket"), "--remote begins with ftp, which is none of s3://"),
        (("--disk-dir", other), "--disk-dir .* is not a directory"),
        (("--tls-cert", other, "--tls-key", other), "--tls-cert"),
        (("--importance", "gated", "--importance-gate", other), "no quality gate"),
        (("--nats", "nats://127.0.0.1:1", "--config", settings), "worker.mover: 'x' is none of auto, per_page"),
    ]

    done = run_up(tmp_path / "data", *(flag for flags, _ in wrong for flag in flags))

    assert done.returncode == 2, done.stderr
    assert [told for _, told in wrong if not re.search(told, done.stderr)] == [], done.stderr
    assert "Starting" not in done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    """Those of the command line, of the environment and of the file, whichever process they belong to."""
    cell = file_with(tmp_path / "cell.toml", "[scheduler]\nclock_bits = 99\n[gateway]\ntenants = '/none/tenants'\n")
    keys = tmp_path / "keys"
    keys.write_text("salts.a = 'x'")
    before = set(os.listdir(runs_dir()))

    done = run_up(
        tmp_path / "data",
        *("--policy", "nonsense", "--device", "gpu", "--config", cell),
        THERMOCLINE_KEYS=str(keys),
        THERMOCLINE_HOTNESS_EXPRESSION="heat",
    )

    assert done.returncode == 2
    for part in (
        "--policy: 'nonsense'",
        "--device: 'gpu'",
        "scheduler.clock_bits",
        "--tenants /none/tenants",
        f"--keys {keys} can be used by",
        "--hotness-expression: expression 'heat'",
    ):
        assert part in done.stderr
    assert set(os.listdir(runs_dir())) == before
    assert not (tmp_path / "data").exists()
