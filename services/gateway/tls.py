"""The gateway's certificate: read at the start, and again whenever its files change.

Open connections keep the certificate of their handshake; a new one is used for later handshakes. Files that do not fit
together are not used: while a certificate has been replaced and its key has not, the old pair serves.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Literal

from shared import logs
from shared.errors import ConfigError

TlsVersion = Literal["1.2", "1.3"]

LOOK_EVERY_S = 5.0

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

_Stamp = tuple[tuple[int, int, int], ...]

_log = logs.get_logger("gateway.tls")


class ServerTls:
    """The server's TLS context, which stays the same object. ``fault`` says why changed files are not used."""

    def __init__(self, certificate: Path, key: Path, minimum: TlsVersion) -> None:
        """Load the files. Raises ConfigError for files that cannot be read or do not fit together."""
        self._certificate = certificate
        self._key = key
        self._stamp: _Stamp = ()
        self.fault = ""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = _VERSIONS[minimum]
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self._stamp = self._stamp_now()
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tls-cert {certificate} and --tls-key {key}: {error}") from error

    async def watch(self) -> None:
        """Check the files every LOOK_EVERY_S, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> None:
        """Load the files if they have changed; if they cannot be used, log why, once for each change."""
        try:
            stamp = self._stamp_now()
        except OSError:
            stamp = ()  # One of them is missing, perhaps while it is replaced.
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            # A pair that turns out not to fit would leave the context in use half changed.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ValueError) as error:
            _log.error("certificate_not_used", certificate=str(self._certificate), reason=str(error))
            self.fault = str(error)
            return
        self.fault = ""
        _log.info("certificate_replaced", certificate=str(self._certificate))

    def _load(self, context: ssl.SSLContext) -> None:
        # A prompt for the pass phrase of an encrypted key would hang a process without a terminal.
        context.load_cert_chain(self._certificate, self._key, password="")

    def _stamp_now(self) -> _Stamp:
        """Return inode, modification time and size of both files, by which a change shows."""
        stats = [os.stat(path) for path in (self._certificate, self._key)]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)
