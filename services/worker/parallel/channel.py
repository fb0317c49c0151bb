"""Messages between rank 0 and one other rank, over a socket pair that was made when the rank was started.

Nothing queues in front of the socket: a sender waits, for a bounded time, until the socket's buffer takes the message.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from shared.codec import encode
from shared.errors import CodecError, TransportError
from shared.undecodable import UNDECODABLE

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 * 2**20
"""A step of 4,096 requests with contexts of 16k tokens in pages of 16; far more than any batch."""


class ChannelClosed(TransportError):
    """The other side has ended."""


class Channel:
    """One end of a channel. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket, receives: Any, *, timeout_s: float) -> None:
        """``receives`` is the type, or union, of incoming messages; ``timeout_s`` bounds the wait when sending."""
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(receives)
        self.timeout_s = timeout_s

    def fileno(self) -> int:
        """Return the socket's descriptor, to poll it."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises ChannelClosed, or TransportError when the other side does not take it in time."""
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise TransportError(f"a message of {len(data)} bytes does not go to a rank")
        try:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError as error:
            raise TransportError(f"the other side took nothing for {self.timeout_s} s") from error
        except OSError as error:
            raise ChannelClosed(f"the other side is gone: {error.strerror}") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; without ``timeout_s`` wait for it as long as the other side lives.

        Raises ChannelClosed, TransportError when time is over, CodecError for bytes that are no such message.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        if length > MAX_MESSAGE_BYTES:
            raise CodecError(f"a message of {length} bytes")
        try:
            return self._decoder.decode(self._read(length, timeout_s))
        except UNDECODABLE as error:
            raise CodecError(f"not a message between ranks: {error}") from error

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()

    def _read(self, count: int, timeout_s: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                self._socket.settimeout(timeout_s)
                piece = self._socket.recv(min(count - len(data), 2**20))
            except TimeoutError as error:
                raise TransportError(f"no message within {timeout_s} s") from error
            except OSError as error:
                raise ChannelClosed(f"the other side is gone: {error.strerror}") from error
            if not piece:
                raise ChannelClosed("the other side is gone")
            data += piece
        return bytes(data)
