"""Keys from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.key_file import read_api_keys
from shared.errors import ConfigError
from tests.unit.gateway.running_gateway import running_gateway, says


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\nfirst-key\n  second-key  \nfirst-key\n")
    path.chmod(0o600)
    return path


async def test_keys_of_a_file_open_the_api(file: Path) -> None:
    """Beside those that are given on the command line."""
    async with running_gateway(says("hi"), api_keys=("plain",), api_keys_file=str(file)) as harness:
        found = [
            (await harness.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code
            for headers in (
                *({"authorization": f"Bearer {key}"} for key in ("plain", "first-key", "second-key", "third", "#")),
                {},
            )
        ]

    assert found == [200, 200, 200, 401, 401, 401]


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("", 0o600, "holds no key"),
        ("# nothing\n", 0o600, "holds no key"),
        ("good\nnot a key\n", 0o600, "line 2 is no key"),
        ("good\nschlüssel\n", 0o600, "line 2 is no key"),
        ("good\n", 0o644, "chmod 600"),
    ],
)
def test_a_faulty_file_is_refused_without_its_content(file: Path, text: str, mode: int, reason: str) -> None:
    """What is wrong is a key, or was meant to be one."""
    file.write_text(text)
    file.chmod(mode)

    with pytest.raises(ConfigError, match=reason) as refusal:
        read_api_keys(str(file))

    assert "good" not in refusal.value.message
    assert "not a key" not in refusal.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match="there is no such file"):
        read_api_keys(str(tmp_path / "none"))
