"""nats-py's client with additions: no downgrade from TLS, files read for each connection, plain error messages.

It overrides a few members of ``nats.aio.client.Client`` that are not documented; the version of nats-py is pinned to
the minor release for that, and tests over real servers run each of them.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Callable
from typing import Any

import nats.aio.client
import nats.errors
from nats.aio.transport import TcpTransport
from nats.protocol.command import pub_cmd

from shared.bus.access import Access
from shared.errors import ConfigError

FAREWELL_S = 1.0

BUFFERED_BYTES = 64 * 1024
"""Bytes in a connection's buffer up to which commands are written without waiting for room."""


class InTheClear(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types.
    """The server offers no TLS, but we require it: nothing was sent to it."""

    def __str__(self) -> str:
        """Return the reason, with the prefix of nats-py's errors."""
        return "nats: the server offers no TLS"


class Hung(nats.errors.Error):  # type: ignore[misc]
    """The server ended the connection in the middle of the handshake."""

    def __str__(self) -> str:
        """Return the reason, with the prefix of nats-py's errors."""
        return "nats: the server ended the connection during the handshake"


class Transport(TcpTransport):  # type: ignore[misc]
    """A connection whose close waits for at most FAREWELL_S."""

    def __init__(self) -> None:
        """Begin without a connection."""
        super().__init__()
        self._is_broken = False

    def __bool__(self) -> bool:
        """Return True, also before there is a connection."""
        # nats-py makes a transport of its own in the place of one that is false.
        return True

    @property
    def has_room(self) -> bool:
        """Whether fewer than BUFFERED_BYTES wait to be sent."""
        buffered: int = self._io_writer.transport.get_write_buffer_size()
        return buffered < BUFFERED_BYTES

    async def connect(self, *arguments: Any, **named: Any) -> None:
        """Connect, and forget that an earlier connection broke."""
        self._is_broken = False
        await super().connect(*arguments, **named)

    async def connect_tls(self, *arguments: Any, **named: Any) -> None:
        """Do the TLS handshake; abort the connection where that fails, so that closing it does not hang."""
        try:
            await super().connect_tls(*arguments, **named)
        except BaseException:
            # The stream below never learns that its connection is gone, so waiting for its end would never end.
            self._is_broken = True
            self._bare_io_writer.transport.abort()
            raise

    async def wait_closed(self) -> None:
        """Wait for the end of the connection, at most FAREWELL_S; then abort it."""
        if self._is_broken:
            return
        try:
            # A peer that is away says no farewell, for which TLS would wait half a minute before we reconnect.
            async with asyncio.timeout(FAREWELL_S):
                await super().wait_closed()
        except TimeoutError:
            self._io_writer.transport.abort()


class _Tokens:
    """Unpredictable names of inboxes and of the replies in them.

    nats-py counts on from its first one, and adds two bytes by chance to a reply's. A process that has received one
    call could answer the next ones, which are for others.
    """

    def next(self) -> bytearray:
        """Return 22 hexadecimal digits."""
        return bytearray(secrets.token_hex(11).encode())


class Client(nats.aio.client.Client):  # type: ignore[misc]
    """The client; call ``connect`` with ``**credentials(access)``."""

    def __init__(self, access: Access) -> None:
        """Begin without a connection; the files of ``access`` are read for each one."""
        super().__init__()
        self._transport = Transport()
        self._nuid = _Tokens()
        self._access = access
        self._pending: list[bytes] = []
        self._writes_soon = False
        self._hearers: dict[int, Callable[[Any], None]] = {}

    @property
    def is_clustered(self) -> bool:
        """Whether the connected server is one of several."""
        return bool(self._server_info.get("cluster"))

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """TLS context, made for each connection because certificates are replaced meanwhile.

        Raises nats.errors.Error.
        """
        try:
            return self._access.tls_context()
        except ConfigError as error:
            raise nats.errors.Error(error.message) from error

    async def hear(self, subject: str, hearer: Callable[[Any], None]) -> Any:
        """Subscribe; ``hearer`` is called with each message as it is read, and must be quick.

        nats-py would put each message into a queue, from which a task of the subscription takes it in the loop's next
        turn.
        """

        async def heard_early(message: Any) -> None:
            # The message came before we knew the subscription's number.
            hearer(message)

        subscription = await self.subscribe(subject, cb=heard_early)
        self._hearers[subscription._id] = hearer  # noqa: SLF001 - nats-py has no other name for it.
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._hearers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        hearer = self._hearers.get(sid)
        if hearer is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        message = self._build_message(sid, subject, reply, data, await self._process_headers(headers))
        try:
            hearer(message)
        except Exception as error:
            # Raised any further it would end the task that reads.
            await self._error_cb(error)

    async def _flush_pending(self, force_flush: bool = False) -> Any:  # noqa: FBT002 - it is nats-py's.
        # nats-py wakes a task to write. Here the commands of one turn of the loop are written at its end without one;
        # only where the connection has no room does that task wait for it.
        if force_flush or not self.is_connected or not self._flush_queue.empty() or not self._transport.has_room:
            return await super()._flush_pending(force_flush)
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return None

    def publish_now(self, subject: str, payload: bytes) -> bool:
        """Publish before this returns, behind all earlier messages; return False where the connection has no room.

        ``payload`` has at most ``max_payload`` bytes, and there is a connection.
        """
        if not self._flush_queue.empty() or not self._transport.has_room:
            return False
        self._pending.append(pub_cmd(subject, "", payload))
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._write_pending()
        return True

    def _write_pending(self) -> None:
        self._writes_soon = False
        if self.is_connected and self._pending:  # Otherwise it is written once connected again.
            self._transport.writelines(self._pending[:])
            self._pending.clear()
            self._pending_data_size = 0

    def _connect_command(self) -> bytes:
        # This command is sent first and holds our secrets. nats-py encrypts when the server asks for it, and an
        # attacker between us and the server could leave that out.
        if self._access.wants_tls and not self._server_info.get("tls_required"):
            raise InTheClear
        try:
            key = self._access.user_key()
            if key is not None:
                self._signature_cb = key.sign
                self._user_jwt_cb = key.jwt.encode if key.jwt else None
                self._public_nkey = None if key.jwt else key.public
            made: bytes = super()._connect_command()
        except ConfigError as error:
            raise nats.errors.Error(error.message) from error
        return made

    async def _process_pong(self) -> None:
        # The waiter may have given up, as after a pause of this process. nats-py would fail there and read no more, and
        # the connection would be deaf until enough of its pings go unanswered.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        if not self.is_connected:
            # Neither PONG nor -ERR came back; nats-py would take the connection for established.
            raise Hung


def credentials(access: Access) -> dict[str, Any]:
    """Return the arguments of ``connect`` that authenticate us; the client reads the secrets at each connection."""
    told: dict[str, Any] = {"inbox_prefix": access.inbox_prefix}
    if access.user:
        told |= {"user": access.user, "password": access.current_password}
    if access.has_token:
        told |= {"token": access.current_token}
    if access.server_name:
        told |= {"tls_hostname": access.server_name}
    return told


def refusal(error: Exception) -> str:
    """Return what an operator has to correct, where ``error`` is a permanent refusal; otherwise ""."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = getattr(error, "verify_message", "") or str(error)
        return f"the broker's certificate is not trusted: {reason}; see --nats-ca and --nats-server-name"
    if isinstance(error, ssl.SSLError):
        return f"the broker and we do not agree on TLS: {error}; see --nats-cert and --nats-ca"
    if isinstance(error, InTheClear):
        return (
            "the broker offers no TLS, but tls:// or a setting of --nats-ca, --nats-cert or --nats-server-name wants it"
        )
    text = str(error).lower()
    if "authorization violation" in text or "authentication" in text:
        return (
            "the broker does not accept our credentials; see --nats-user, --nats-password-file, --nats-token-file "
            "and --nats-credentials"
        )
    return ""


def denied_subject(error: Exception) -> tuple[str, str] | None:
    """Return ("publish" or "subscribe", subject) where ``error`` is a missing permission; otherwise None."""
    text = str(error)
    if "permissions violation" not in text.lower():
        return None
    subject = text.split('"')[1] if text.count('"') >= 2 else ""
    return ("subscribe" if "subscription" in text.lower() else "publish"), subject
