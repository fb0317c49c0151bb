"""uvicorn's HTTP protocol, with OpenAI's error shape below the application and bounded headers."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.gateway.event_stream import ABORT_EXTENSION
from services.gateway.openai_schema.errors import error_body
from shared.errors import InvalidRequest

MAX_HEADER_BYTES = 64 * 1024


class GatewayHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _header_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """The answer to bytes that are no HTTP; the connection ends with it."""
        body = error_body(InvalidRequest(msg, code="invalid_http"))
        head = [STATUS_LINE[400]]
        head += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        head.append(b"content-type: application/json\r\nconnection: close\r\n")
        head.append(b"content-length: " + str(len(body)).encode() + b"\r\n\r\n")
        self.transport.write(b"".join(head) + body)
        self.transport.close()

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > MAX_HEADER_BYTES:
            # The parser turns what a callback raises into its own error, which ends in send_400_response.
            raise ValueError("the request's headers are too large")
