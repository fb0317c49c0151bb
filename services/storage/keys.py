"""Encryption keys by tenant, as they are written in a file or a variable: checked, all faults at once, never shown.

TOML, or the same as JSON::

    default = "<base64 of 32 bytes>"      # for requests without a cache salt

    [salts]
    "<cache salt>" = "<base64 of 32 bytes>"

``openssl rand -base64 32`` makes a key. A tenant is known here by ``shared.ids.key_digest`` of its salt, because the
salt itself stays at the gateway; those without one are known as :data:`DEFAULT_KEY_ID`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import tomllib

from shared.errors import ConfigError
from shared.ids import key_digest
from shared.undecodable import UNPARSABLE

KEY_BYTES = 32
DEFAULT_KEY_ID = "default"
"""The key of requests without a salt. Not 32 hex digits, so no salt has it."""

Keys = dict[str, bytes]

_INLINE_TOML = re.compile(r"\s*(default\s*=|\[\s*salts\s*\]|salts\s*[.=])")


def is_inline(setting: str) -> bool:
    """Return whether ``--keys`` (``THERMOCLINE_KEYS``) holds the keys themselves instead of a file's name."""
    return setting.lstrip().startswith("{") or bool(_INLINE_TOML.match(setting))


def parse_keys(text: str, source: str) -> Keys:
    """Return the keys in ``text`` by key id.

    ``source`` is where they are from, for ConfigError, which names every fault. Faults name a tenant by the digest of
    its salt: a salt is a password of sorts, and errors get logged.
    """
    try:
        table = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except UNPARSABLE as error:
        # Only the position: the parsers' messages may quote the line, and so would a chained cause.
        raise ConfigError(f"{source} is neither TOML nor JSON{_place_of(error)}") from None
    faults = [
        f"{source}: unknown entry number {place}; known are default and salts"
        for place, name in enumerate(table, start=1)
        if name not in ("default", "salts")
    ]
    salts = table.get("salts", {})
    if not isinstance(salts, dict):
        faults.append(f"{source}: salts is not a table")
        salts = {}
    keys: Keys = {}
    if "default" in table:
        _add(keys, faults, DEFAULT_KEY_ID, table["default"], f"{source}: default")
    for place, (salt, value) in enumerate(salts.items(), start=1):
        if not salt:
            faults.append(f"{source}: number {place} of salts is empty; requests without a salt use default")
            continue
        key_id = key_digest(salt)
        _add(keys, faults, key_id, value, f"{source}: number {place} of salts ({key_id})")
    if faults:
        raise ConfigError("; ".join(faults))
    return keys


def parse_key(value: object, name: str) -> bytes:
    """Return one key from its base64 text. Raises ConfigError that does not show it."""
    try:
        key = base64.b64decode(value.strip(), validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        raise ConfigError(f"{name} is not base64") from None
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{name} is not {KEY_BYTES} bytes in base64")
    return key


def _add(keys: Keys, faults: list[str], key_id: str, value: object, name: str) -> None:
    try:
        keys[key_id] = parse_key(value, name)
    except ConfigError as error:
        faults.append(error.message)


def _place_of(error: Exception) -> str:
    found = re.search(r"line (\d+)", str(error))
    return f" (line {found[1]})" if found else ""
