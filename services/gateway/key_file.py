"""``--api-keys-file``: keys, one a line, that no process list and no environment shows."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.secret_file import BY_OTHERS, WRITTEN_BY_GROUP, read_secrets

MAX_BYTES = 2**20
FLAG = "--api-keys-file"


def read_api_keys(name: str) -> tuple[str, ...]:
    """Return the keys of a file, none where ``name`` is "". Empty lines and those that begin with # are left out.

    Raises ConfigError for a file that is missing, that other users may read, or that holds no key.
    """
    if not name:
        return ()
    path = Path(name).expanduser()
    try:
        _, keys = read_secrets(path, FLAG, _parse, forbidden=BY_OTHERS | WRITTEN_BY_GROUP, max_bytes=MAX_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"{FLAG} {path}: there is no such file") from error
    return keys


def _parse(text: str, name: str) -> tuple[str, ...]:
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise ConfigError(f"{name} holds no key")
    # An error names the line and never quotes it: it is a key, or was meant to be one.
    wrong = [number for number, line in enumerate(lines, 1) if not line.isascii() or (" " in line and line[:1] != "#")]
    if wrong:
        raise ConfigError(f"{name}: line {wrong[0]} is no key: a key has ASCII characters without spaces")
    return keys
