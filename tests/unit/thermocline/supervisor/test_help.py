"""What ``thermocline up --help`` shows."""

from __future__ import annotations

import msgspec

from thermocline.supervisor.__main__ import GROUPS, parser
from thermocline.supervisor.config import SupervisorConfig


def test_every_setting_of_up_is_in_one_group() -> None:
    """So none stands under a heading that says nothing."""
    grouped = [name for names in GROUPS.values() for name in names]

    assert sorted(grouped) == sorted(field.name for field in msgspec.structs.fields(SupervisorConfig))


def test_help_says_how_the_settings_of_processes_are_reached() -> None:
    """Up itself has a part of all settings."""
    text = parser().format_help()

    assert "--device-kv-bytes" in text
    assert "thermocline settings" in " ".join(text.split())
