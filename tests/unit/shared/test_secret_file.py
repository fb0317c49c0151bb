"""Files of secrets are read whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.secret_file import BY_GROUP, BY_OTHERS, WRITTEN_BY_GROUP, look_at, read_secrets, version_of


def secret(tmp_path: Path, content: bytes = b"word", mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def read(path: Path, forbidden: int = BY_GROUP | BY_OTHERS) -> str:
    return read_secrets(path, "--secret", lambda text, name: text, forbidden=forbidden, max_bytes=8)[1]


def test_a_file_has_the_version_that_it_had_when_it_was_read(tmp_path: Path) -> None:
    """And another once it was replaced."""
    path = secret(tmp_path)
    version, text = read_secrets(path, "--secret", lambda text, name: text, forbidden=BY_OTHERS, max_bytes=8)

    assert text == "word"
    assert version == version_of(path)
    path.unlink()
    assert version_of(path) is None
    secret(tmp_path, b"other")
    assert version_of(path) not in (None, version)


@pytest.mark.parametrize(
    ("mode", "forbidden", "use"),
    [
        (0o604, BY_OTHERS, "used by others"),
        (0o640, BY_GROUP | BY_OTHERS, "used by its group"),
        (0o666, BY_GROUP | BY_OTHERS, "used by its group or used by others"),
        (0o660, WRITTEN_BY_GROUP | BY_OTHERS, "written by its group"),
    ],
)
def test_what_others_can_use_is_refused(mode: int, forbidden: int, use: str, tmp_path: Path) -> None:
    """The error says who can, and what to do."""
    path = secret(tmp_path, mode=mode)

    with pytest.raises(ConfigError) as caught:
        read(path, forbidden)

    assert caught.value.message == f"--secret {path} can be {use} (mode {mode:o}); chmod 600 it"


def test_a_group_may_read_where_only_writing_is_forbidden(tmp_path: Path) -> None:
    """As with secrets that Kubernetes mounts."""
    assert read(secret(tmp_path, mode=0o640), WRITTEN_BY_GROUP | BY_OTHERS) == "word"


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    """Nobody has to try again for the next one."""
    with pytest.raises(ConfigError, match=r"used by others .*; .* is larger than 8 bytes"):
        read(secret(tmp_path, b"123456789", 0o604))
    with pytest.raises(ConfigError, match=r"used by others .*; .* is not UTF-8"):
        read(secret(tmp_path, b"\xff", 0o604))


def test_a_file_that_is_not_there_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file may mean that there are no secrets."""
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)


async def test_coroutines_see_the_same_version(tmp_path: Path) -> None:
    """Of a file that is there, and none of one that is not."""
    path = tmp_path / "secrets"
    path.write_text("a")

    assert await look_at(path) == version_of(path) is not None
    assert await look_at(tmp_path / "none") is None
