"""nats-py's client with additions: no downgrade from TLS, files read for each connection, plain error messages.

It overrides a few members of ``nats.aio.client.Client`` that are not documented; the version of nats-py is pinned to
the minor release for that, and tests over real servers run each of them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from collections.abc import Callable
from typing import Any

import nats.aio.client
import nats.errors
from nats.aio.transport import TcpTransport
from nats.protocol.command import hpub_cmd, pub_cmd
from nats.protocol.parser import AWAITING_CONTROL_LINE

from shared import logs
from shared.bus.access import Access
from shared.bus.heard import Heard, cut
from shared.errors import ConfigError

FAREWELL_S = 1.0

BUFFERED_BYTES = 64 * 1024
"""Bytes in a connection's buffer up to which commands are written without waiting for room."""

_BLANK = re.compile(r"[\s\0]")
_LINE_END = re.compile(r"[\r\n\0]")

_log = logs.get_logger("bus")


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
        self.is_read_out = False  # Whether everything that came was read, and a task waits for more.

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

    def on_bytes(self, hear: Callable[[bytes], bytes]) -> None:
        """Give what comes to ``hear``, in the turn in which it comes, and only what that returns to readers."""
        reader = self._io_reader
        keep, self.is_read_out = reader.feed_data, False

        def feed_data(data: bytes) -> None:
            left = hear(data)
            if left:
                self.is_read_out = False
                keep(left)

        reader.feed_data = feed_data

    async def read(self, buffer_size: int) -> bytes:
        """Return what has come, at least a byte; b"" at the end of the connection."""
        self.is_read_out = True
        try:
            got: bytes = await super().read(buffer_size)
            return got
        finally:
            self.is_read_out = False

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
        """Subscribe; ``hearer`` is called with each message (:class:`~shared.bus.heard.Heard`) and must be quick.

        It is called in the turn of the loop in which the bytes come. nats-py would wake a task that reads, which puts
        each message into a queue, from which a task of the subscription takes it.
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
        else:
            self._tell(hearer, Heard(subject.decode(), reply.decode(), data, headers or b""))

    def _hear_now(self, data: bytes) -> bytes:
        """Hear the whole messages at the front of ``data``; return what is left to nats-py.

        That is everything as long as nats-py has not done all that came before.
        """
        at = 0
        is_next = self._transport.is_read_out and not self._ps.buf and self._ps.state == AWAITING_CONTROL_LINE
        while is_next and self.is_connected and (found := cut(data, at)) is not None:
            hearer = self._hearers.get(found.number)
            if hearer is None:
                break
            self._tell(hearer, found.message)
            at = found.end
        return data[at:]

    def _tell(self, hearer: Callable[[Any], None], message: Heard) -> None:
        try:
            hearer(message)
        except Exception:
            _log.exception("hearer_failed", subject=message.subject)

    async def _flush_pending(self, force_flush: bool = False) -> Any:  # noqa: FBT002 - it is nats-py's.
        # nats-py wakes a task to write. Here the commands of one turn of the loop are written at its end without one;
        # only where the connection has no room does that task wait for it.
        if force_flush or not self.is_connected or not self._has_room:
            return await super()._flush_pending(force_flush)
        self._write_soon()
        return None

    @property
    def _has_room(self) -> bool:
        return self._flush_queue.empty() and self._pending_data_size < BUFFERED_BYTES and self._transport.has_room

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish at the end of this turn of the loop, behind all earlier messages; wait only for room."""
        if self._put(subject, payload, reply, headers):
            self._write_soon()
        else:
            await super().publish(subject, payload, reply, headers)

    def publish_now(self, subject: str, payload: bytes) -> bool:
        """Publish before this returns, behind all earlier messages; return False where the connection has no room.

        ``payload`` has at most ``max_payload`` bytes, and there is a connection.
        """
        if not self._put(subject, payload, "", None):
            return False
        self._write_pending()
        return True

    def _put(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> bool:
        """Queue a command for the connection; return False where there is no room, or nats-py has to say what is wrong.

        Raises nats.errors.Error for a subject, or a header, that the server would read as something else.
        """
        if not self.is_connected or not self._has_room or len(payload) > self._max_payload:
            return False
        if not subject or _BLANK.search(subject) or _BLANK.search(reply):
            raise nats.errors.BadSubjectError
        if headers:
            lines = [name + ": " + value for name, value in headers.items()]  # Not by format: nats-py's are of an enum.
            if any(_LINE_END.search(line) for line in lines):
                raise nats.errors.Error("a header with a line break")
            head = "\r\n".join(("NATS/1.0", *lines, "", "")).encode()
            command = hpub_cmd(subject, reply, head, payload)
        else:
            command = pub_cmd(subject, reply, payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        return True

    def _write_soon(self) -> None:
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_pending)

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
        self._transport.on_bytes(self._hear_now)


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
