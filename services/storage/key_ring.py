"""The encryption keys in force: read at the start, and again when their file changes.

Taking a tenant's key out of the file makes that tenant's cache unreadable, on every encrypted tier. A missing file
holds no keys, so deleting it revokes them all. A file that cannot be parsed changes nothing: a typing error must not
make every tenant's cache unreadable; it is logged and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from services.storage import measures
from services.storage.config import DEFAULT_KEY_VARIABLE
from services.storage.keys import DEFAULT_KEY_ID, Keys, is_inline, parse_key, parse_keys
from shared import logs
from shared.errors import ConfigError, KeyMissing
from shared.secret_file import BY_GROUP, BY_OTHERS, Version, read_secrets, version_of

CHECK_EVERY_S = 1.0
MAX_FILE_BYTES = 4 * 2**20

_log = logs.get_logger("storage")


class KeyRing:
    """Keys by key id; thread-safe. Time is an argument."""

    def __init__(self, setting: str, *, environ: Mapping[str, str], now_s: float) -> None:
        """Open ``setting``: the file's name or the keys themselves (``keys.is_inline``). Raises ConfigError."""
        self._path = None if is_inline(setting) or not setting else Path(setting)
        self._lock = threading.Lock()
        self._checked_s = now_s
        self._version: Version | None = None
        self.fault = ""  # Why the file's present content is not used.
        self._inline: Keys = {}
        faults = []
        try:
            if DEFAULT_KEY_VARIABLE in environ:
                self._inline[DEFAULT_KEY_ID] = parse_key(environ[DEFAULT_KEY_VARIABLE], DEFAULT_KEY_VARIABLE)
        except ConfigError as error:
            faults.append(error.message)
        loaded: Keys = {}
        try:
            if self._path:
                self._version, loaded = _read(self._path)
            elif setting:
                loaded = parse_keys(setting, "--keys")
        except FileNotFoundError:
            faults.append(f"--keys {self._path} does not exist")
        except ConfigError as error:
            faults.append(error.message)
        if faults:
            raise ConfigError("; ".join(faults))
        if not self._path:
            self._inline = loaded | self._inline
            loaded = {}
        self._use(loaded)

    def key(self, key_id: str, now_s: float) -> bytes:
        """Return the 32 bytes of a tenant's key ("" is :data:`DEFAULT_KEY_ID`). Raises KeyMissing.

        Looks at the file first if that was not done in the last second.
        """
        with self._lock:
            if self._path and now_s - self._checked_s >= CHECK_EVERY_S:
                self._checked_s = now_s
                self._refresh(self._path)
            found = self._keys.get(key_id or DEFAULT_KEY_ID)
        if found is None:
            raise KeyMissing(f"there is no encryption key for {key_id or DEFAULT_KEY_ID}")
        return found

    def reload(self, now_s: float) -> None:
        """Read the file now, as after SIGHUP, changed or not. Faults are logged, not raised."""
        with self._lock:
            self._checked_s = now_s
            self._version = None
            if self._path:
                self._refresh(self._path)

    def _refresh(self, path: Path) -> None:
        try:
            version = version_of(path)
            if version is not None and version == self._version:
                return
            self._version = version  # The version of a faulty file, too, so that each fault is logged once.
            self._version, keys = _read(path)
        except FileNotFoundError:
            if self._keys != self._inline:
                _log.error("keys_file_gone", file=str(path))
                measures.KEY_FAULTS.inc()
                self.fault = f"{path} is gone, and its keys with it"
                self._use({})
            self._version = None
            return
        except ConfigError as error:
            _log.error("keys_file_refused", file=str(path), reason=str(error))
            self.fault = f"the earlier keys are in force: {error.message}"
            measures.KEY_FAULTS.inc()
            return
        self.fault = ""
        self._use(keys)
        _log.info("keys_loaded", file=str(path), keys=len(self._keys))

    def _use(self, keys: Keys) -> None:
        # Variables win over the file, as for every setting.
        self._keys = keys | self._inline
        measures.KEYS.set(len(self._keys))


def _read(path: Path) -> tuple[Version, Keys]:
    """Return the file's version and keys.

    Raises FileNotFoundError, or ConfigError if others may read it or it is faulty.
    """
    return read_secrets(path, "--keys", parse_keys, forbidden=BY_GROUP | BY_OTHERS, max_bytes=MAX_FILE_BYTES)
