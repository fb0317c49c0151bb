"""The keys in force: files and variables, changes of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.storage import measures
from services.storage.config import DEFAULT_KEY_VARIABLE
from services.storage.key_ring import KeyRing
from shared.errors import ConfigError, KeyMissing
from shared.ids import key_digest
from tests.unit.storage.made_ciphers import encoded

ALICE, BOB = key_digest("alice"), key_digest("bob")


def write(path: Path, *, default: int | None = None, mode: int = 0o600, **salts: int) -> None:
    lines = [] if default is None else [f'default = "{encoded(default)}"']
    lines += ["[salts]", *(f'{salt} = "{encoded(number)}"' for salt, number in salts.items())]
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines))
    fresh.chmod(mode)
    fresh.rename(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, default=1, alice=2, bob=3)
    return path


def ring(path: Path | str, **environ: str) -> KeyRing:
    return KeyRing(str(path), environ=environ, now_s=0.0)


def has(keys: KeyRing, key_id: str, now_s: float) -> bool:
    try:
        keys.key(key_id, now_s)
    except KeyMissing:
        return False
    return True


def test_keys_of_a_file_are_found_by_their_digests(file: Path) -> None:
    """Each salt has its key, no salt has the default, and an unknown salt has none: not even everybody's."""
    keys = ring(file)

    assert [keys.key(key_id, 0.0)[0] for key_id in ("", "default", ALICE, BOB)] == [1, 1, 2, 3]
    with pytest.raises(KeyMissing):
        keys.key(key_digest("mallory"), 0.0)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    """Group and world get nothing, not even the right to write or execute."""
    file.chmod(mode)

    with pytest.raises(ConfigError, match="chmod 600"):
        ring(file)


def test_faults_of_file_and_variable_are_told_at_once(file: Path) -> None:
    """Mode, contents and the variable: one error."""
    file.write_text('default = "x"\nother = 1')
    file.chmod(0o644)

    with pytest.raises(ConfigError) as raised:
        ring(file, **{DEFAULT_KEY_VARIABLE: "y"})

    assert all(part in raised.value.message for part in (DEFAULT_KEY_VARIABLE, "chmod 600", "default", "unknown entry"))


def test_a_file_that_is_not_there_at_the_start_is_refused(tmp_path: Path) -> None:
    """Whoever names a file means to encrypt."""
    with pytest.raises(ConfigError, match="does not exist"):
        ring(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        ring(tmp_path)


def test_variables_do_without_a_file(file: Path) -> None:
    """Keys in the setting itself and the default key in a variable, which wins over the file's."""
    inline = ring(f'salts.alice = "{encoded(7)}"', **{DEFAULT_KEY_VARIABLE: encoded(8)})

    assert (inline.key(ALICE, 0.0)[0], inline.key("", 0.0)[0]) == (7, 8)
    assert ring(file, **{DEFAULT_KEY_VARIABLE: encoded(8)}).key("", 0.0)[0] == 8


def test_a_key_taken_out_of_the_file_is_gone_within_a_second(file: Path) -> None:
    """The file is looked at once a second, and the other keys stay."""
    keys = ring(file)
    write(file, default=1, bob=3)

    assert has(keys, ALICE, 0.9)
    assert not has(keys, ALICE, 1.0)
    assert has(keys, BOB, 1.0)
    assert has(keys, "", 1.0)


def test_reload_does_not_wait_for_the_second(file: Path) -> None:
    """SIGHUP takes effect at once."""
    keys = ring(file)
    write(file, default=1, bob=3)

    keys.reload(0.1)

    assert not has(keys, ALICE, 0.1)


def test_a_file_that_went_away_holds_no_keys(file: Path) -> None:
    """Deleting the file is deleting its keys; they are back with it. A key in a variable stays."""
    keys = ring(file, **{DEFAULT_KEY_VARIABLE: encoded(8)})
    file.unlink()

    assert not has(keys, BOB, 1.0)
    assert keys.key("", 1.0)[0] == 8
    write(file, bob=3)
    assert has(keys, BOB, 2.0)


@pytest.mark.parametrize("fault", ["syntax", "mode"])
def test_a_faulty_file_changes_nothing_and_is_counted_once(file: Path, fault: str) -> None:
    """Keys stay as they were until the file is sound again."""
    keys = ring(file)
    before = measures.KEY_FAULTS._value.get()
    if fault == "syntax":
        file.write_text("[salts")
    else:
        write(file, mode=0o644, bob=4)

    assert [keys.key(BOB, now_s)[0] for now_s in (1.0, 2.0, 3.0)] == [3, 3, 3]
    assert measures.KEY_FAULTS._value.get() == before + 1
    write(file, bob=4)
    os.utime(file, ns=(1, 1))
    assert keys.key(BOB, 4.0)[0] == 4
