"""Messages as the server sends them (``MSG`` and ``HMSG`` of NATS's client protocol), cut out of bytes. Pure."""

from __future__ import annotations

from typing import NamedTuple

_VERSION = b"NATS/1.0"

_LINE_BYTES = 4096
"""Bound on a control line, the server's own by default."""


class Heard:
    """A message. Its headers are read when they are asked for: most are not."""

    __slots__ = ("_head", "data", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, head: bytes = b"") -> None:
        """``head`` is the block of headers as it came; empty without any."""
        self.subject, self.reply, self.data, self._head = subject, reply, data, head

    @property
    def headers(self) -> dict[str, str]:
        """The headers by name; that of the server's own word has ``Status``, and ``Description`` if it says more."""
        return parse_headers(self._head) if self._head else {}


class Cut(NamedTuple):
    """A message, the number of the subscription that it is for, and where the next one begins."""

    number: int
    message: Heard
    end: int


def cut(data: bytes, at: int) -> Cut | None:
    """Return the message that begins at ``data[at]``; None if it is not whole, or if something else begins there."""
    line_end = data.find(b"\r\n", at, at + _LINE_BYTES)
    if line_end < 0:
        return None
    fields = data[at:line_end].split()
    try:
        if fields[0] == b"MSG":
            head_bytes, nbytes, fixed = 0, int(fields[-1]), 4
        elif fields[0] == b"HMSG":
            head_bytes, nbytes, fixed = int(fields[-2]), int(fields[-1]), 5
        else:
            return None
        if not fixed <= len(fields) <= fixed + 1 or not 0 <= head_bytes <= nbytes:
            return None
        begin = line_end + 2
        body, end = begin + head_bytes, begin + nbytes
        if end + 2 > len(data):
            return None
        reply = fields[3].decode() if len(fields) > fixed else ""
        return Cut(int(fields[2]), Heard(fields[1].decode(), reply, data[body:end], data[begin:body]), end + 2)
    except (IndexError, ValueError):
        return None  # It is no message: nats-py says what is wrong with it.


def parse_headers(block: bytes) -> dict[str, str]:
    r"""Return headers by name, from a block such as ``NATS/1.0 100 Idle Heartbeat\r\nName: value\r\n\r\n``.

    A status and its text are ``Status`` and ``Description``. Of several values of one name the last one stays. Bytes
    that are not UTF-8 are replaced, and lines without a name are skipped.
    """
    first, *lines = block.decode(errors="replace").split("\r\n")
    found: dict[str, str] = {}
    status, _, text = first[len(_VERSION) :].strip().partition(" ")
    if status.isdigit():
        found["Status"] = status
        if text:
            found["Description"] = text.strip()
    for line in lines:
        name, is_header, value = line.partition(":")
        if is_header and name.strip():
            found[name.strip()] = value.strip()
    return found
