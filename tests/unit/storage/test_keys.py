"""Encryption keys as they are written."""

import base64
import json

import pytest

from services.storage.keys import DEFAULT_KEY_ID, is_inline, parse_key, parse_keys
from shared.errors import ConfigError
from shared.ids import key_digest

ONE = base64.b64encode(bytes([1]) * 32).decode()
TWO = base64.b64encode(bytes([2]) * 32).decode()


def test_toml_and_json_say_the_same() -> None:
    """Both hold a default key and keys by salt, which are known by the digests of the salts."""
    toml = f'default = "{ONE}"\n[salts]\n"tenant a" = "{TWO}"\n'

    keys = parse_keys(toml, "test")

    assert keys == {DEFAULT_KEY_ID: bytes([1]) * 32, key_digest("tenant a"): bytes([2]) * 32}
    assert parse_keys(json.dumps({"default": ONE, "salts": {"tenant a": TWO}}), "test") == keys


def test_every_fault_is_told_and_no_secret() -> None:
    """Five faults in one error, which shows neither keys nor salts."""
    toml = f'default = "short"\nother = 1\n[salts]\n"secret salt" = "{ONE[:-4]}"\n"" = "{TWO}"\nnumber = 7\n'

    with pytest.raises(ConfigError) as raised:
        parse_keys(toml, "keys.toml")

    message = raised.value.message
    assert message.count(";") >= 4
    assert all(part in message for part in ("default", "unknown entry number 2", key_digest("secret salt"), "is empty"))
    assert not any(secret in message for secret in ("secret salt", "short", ONE[:-4], TWO))


@pytest.mark.parametrize("text", ['default = "abc', '{"default": "abc', "[salts]\nx = hunter2", "salts = 3"])
def test_what_cannot_be_parsed_is_not_quoted(text: str) -> None:
    """The error names the source, neither its text nor a cause that holds it."""
    with pytest.raises(ConfigError, match=r"keys\.toml") as raised:
        parse_keys(text, "keys.toml")

    assert "abc" not in raised.value.message
    assert "hunter2" not in raised.value.message
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("value", ["", "not base64!", base64.b64encode(bytes(16)).decode(), 5, None])
def test_a_key_is_32_bytes_in_base64(value: object) -> None:
    """Anything else is refused by the name of its place."""
    with pytest.raises(ConfigError, match="VARIABLE is not"):
        parse_key(value, "VARIABLE")


@pytest.mark.parametrize(
    ("setting", "is_text"),
    [
        ("/etc/thermocline/keys.toml", False),
        ("keys=old.toml", False),
        ("", False),
        ('default = "x"', True),
        ('[salts]\n"a" = "x"', True),
        ('salts.a = "x"', True),
        ('{"default": "x"}', True),
    ],
)
def test_names_of_files_and_keys_are_told_apart(setting: str, is_text: bool) -> None:
    """A setting that begins as TOML or JSON of keys holds them, any other is a file."""
    assert is_inline(setting) is is_text
