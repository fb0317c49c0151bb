"""Settings of a run."""

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
