"""Settings of a run."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from thermocline.chaos.__main__ import main
from thermocline.chaos.settings import ChaosSettings


def test_every_fault_of_the_settings_is_said_at_once() -> None:
    """As everywhere."""
    with pytest.raises(ConfigError) as caught:
        ChaosSettings(workers=0, faults=0, requests_per_s=0)

    assert "--workers" in caught.value.message
    assert "--requests-per-s" in caught.value.message
    assert "--faults 0 needs --minutes" in caught.value.message


def test_a_bad_flag_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code for it."""
    assert main(["--workers", "0"]) == 2
    assert "--workers must be at least 1" in capsys.readouterr().err


def test_the_pools_are_smaller_than_what_the_load_touches(tmp_path: Path) -> None:
    """So that every tier is busy: device over host over disk."""
    cell = ChaosSettings().cell(tmp_path)

    assert cell.device_kv_bytes < cell.host_kv_bytes < cell.disk_kv_bytes  # type: ignore[operator]
