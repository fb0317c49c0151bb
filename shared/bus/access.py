"""A client's access to the broker: TLS, its identity, and the least message size that it needs.

Files are read again for every connection, so rotated ones are used from the next reconnection on. At the start all of
them are read once, so that a process with a missing or broken file refuses to start.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE, BrokerSettings
from shared.bus.nkeys import UserKey, read_user_key
from shared.errors import ConfigError

PENDING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Access:
    """Servers and credentials. ``urls`` hold no secrets; at most one of user, token and credentials is given."""

    urls: tuple[str, ...]
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    credentials: str = ""
    least_payload_bytes: int = 0
    pending_bytes: int = PENDING_BYTES

    @property
    def wants_tls(self) -> bool:
        """Whether unencrypted connections are refused."""
        return bool(self.ca or self.cert or self.server_name) or any(url.startswith("tls://") for url in self.urls)

    @property
    def has_token(self) -> bool:
        """Whether the client authenticates by a token, given directly or in a file."""
        return bool(self.token or self.token_file)

    @property
    def inbox_prefix(self) -> str:
        """Prefix of our reply subjects: by user or nkey, so that permissions can keep others from reading them."""
        key = self.user_key()
        return inbox_prefix(key.public if key is not None else self.user)

    def check(self) -> None:
        """Read every file once. Raises ConfigError with all faults."""
        faults = []
        for attempt in (self.tls_context, self.current_password, self.current_token, self.user_key):
            try:
                attempt()
            except ConfigError as error:
                faults.append(error.message)
        if faults:
            raise ConfigError("; ".join(faults))

    def tls_context(self) -> ssl.SSLContext:
        """Return a context that verifies the broker's certificate and shows ours, if any. Raises ConfigError."""
        flag = f"--nats-ca {self.ca}"
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                flag = f"--nats-cert {self.cert} and --nats-key {self.key}"
                # A prompt for the pass phrase of an encrypted key would hang a process without a terminal.
                context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag}: {error}") from error
        return context

    def current_password(self) -> str:
        """Return the password as the file has it now, or the one given. Raises ConfigError."""
        return _read("--nats-password-file", self.password_file) if self.password_file else self.password

    def current_token(self) -> str:
        """Return the token as the file has it now, or the one given. Raises ConfigError."""
        return _read("--nats-token-file", self.token_file) if self.token_file else self.token

    def user_key(self) -> UserKey | None:
        """Return the key of decentralised credentials; None without them. Raises ConfigError."""
        if not self.credentials:
            return None
        try:
            return read_user_key(_read("--nats-credentials", self.credentials))
        except ConfigError as error:
            raise ConfigError(f"--nats-credentials {self.credentials}: {error.message}") from error


def inbox_prefix(identity: str) -> str:
    """Return the inbox prefix of a user or public nkey; "_INBOX" for "". Permissions allow it with ``.>`` behind it."""
    return f"_INBOX.{re.sub('[^A-Za-z0-9_-]', '_', identity)}" if identity else "_INBOX"


def is_inbox(subject: str) -> bool:
    """Return whether ``subject`` is one subject below ``_INBOX``, where replies to calls are received."""
    first, *rest = subject.split(".")
    return first == "_INBOX" and bool(rest) and not {"", "*", ">"} & set(rest)


def _read(flag: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"{flag} {path} is empty")
    return text


def access_of(settings: BrokerSettings, environ: Mapping[str, str]) -> Access:
    """Return the access that ``settings`` and the variables with secrets give.

    Raises ConfigError, also for files that cannot be read.
    """
    password = "" if settings.nats_password_file else environ.get(PASSWORD_VARIABLE, "")
    token = "" if settings.nats_token_file else environ.get(TOKEN_VARIABLE, "")
    if settings.nats_user and not (password or settings.nats_password_file):
        raise ConfigError(f"--nats-user needs --nats-password-file or {PASSWORD_VARIABLE}")
    made = from_urls(
        settings.nats,
        ca=settings.nats_ca,
        cert=settings.nats_cert,
        key=settings.nats_key,
        server_name=settings.nats_server_name,
        user=settings.nats_user,
        password=password if settings.nats_user else "",
        password_file=settings.nats_password_file,
        token="" if settings.nats_user or settings.nats_credentials else token,
        token_file=settings.nats_token_file,
        credentials=settings.nats_credentials,
        least_payload_bytes=settings.nats_least_payload_bytes,
        pending_bytes=settings.nats_pending_bytes,
    )
    made.check()
    return made


def from_urls(urls: Sequence[str], **rest: str | int) -> Access:
    """Return an access with user, password or token taken out of ``urls``: logs do not show them.

    Servers that a cluster announces get them, too. Raises ConfigError when they differ, or when there are others
    besides.
    """
    parsed = [urlsplit(url if "://" in url else f"nats://{url}") for url in urls]
    told = {(url.username, url.password) for url in parsed if url.username}
    if len(told) > 1:
        raise ConfigError("--nats: the servers' URLs name different users")
    for user, password in told:
        if any(rest.get(way) for way in ("user", "token", "token_file", "credentials")):
            raise ConfigError("--nats has credentials in its URLs, and there are others besides")
        secrets = {"token": unquote(user or "")}
        if password is not None:
            secrets = {"user": unquote(user or ""), "password": unquote(password)}
        rest = {**rest, **secrets}
    return Access(tuple(_bare(url) for url in parsed), **rest)  # type: ignore[arg-type]


def _bare(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
