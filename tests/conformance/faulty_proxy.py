"""A proxy on loopback between a client and an HTTP server that does to requests what networks and outages do."""

from __future__ import annotations

import http.client
import socket
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FORWARD_TIMEOUT_S = 30.0


class FaultyProxy:
    """Forwards to ``target``. ``script`` holds what befalls the next requests, ``always`` what befalls all others:

    * ``""``: nothing; a status such as ``"503"``: that answer;
    * ``"drop"``: the connection ends without an answer; ``"cut"``: it ends in the middle of the body;
    * ``"lost"``: the request is carried out, and its answer is lost;
    * ``"hang"``: no answer until the proxy closes; ``"huge"``: a terabyte is announced, and nothing comes;
    * ``"full"``: 507 for whatever writes.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.script: deque[str] = deque()
        self.always = ""
        self.requests: list[tuple[str, int]] = []
        """Verb and status of each request; 0 without an answer."""
        self.hanging = threading.Event()
        """Set as soon as a request hangs."""
        self.closing = threading.Event()
        self.lock = threading.Lock()
        # A conditional write is one step in a real store; the stand-in behind the proxy looks first and writes then.
        self.write_lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def next_fault(self) -> str:
        with self.lock:
            return self.script.popleft() if self.script else self.always

    def note(self, verb: str, status: int) -> None:
        with self.lock:
            self.requests.append((verb, status))

    def count(self, verb: str, status: int | None = None) -> int:
        """Requests of a verb so far, with that status if one is given."""
        with self.lock:
            return sum(seen == verb and status in (None, answered) for seen, answered in self.requests)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultyProxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _handle(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.next_fault()
        if fault == "full":
            fault = "507" if self.command in ("PUT", "POST") else ""
        if fault in ("drop", "hang"):
            if fault == "hang":
                proxy.hanging.set()
                proxy.closing.wait()
            proxy.note(self.command, 0)
            self._end()
        elif fault.isdigit():
            self._answer(int(fault), {}, b"")
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle  # noqa: N815

    def _forward(self, body: bytes, fault: str) -> None:
        proxy = self.server.proxy
        with proxy.write_lock if self.command == "PUT" else proxy.lock:
            connection = http.client.HTTPConnection(*proxy.target, timeout=FORWARD_TIMEOUT_S)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content, headers = answer.read(), dict(answer.getheaders())
            finally:
                connection.close()
        if fault == "huge":
            self._answer(answer.status, headers | {"Content-Length": str(10**12)}, b"")
            proxy.closing.wait()
            self._end()
        elif fault == "lost":
            proxy.note(self.command, 0)
            self._end()
        elif fault == "cut":
            self._answer(answer.status, headers | {"Content-Length": str(len(content))}, content[: len(content) // 2])
            self._end()
        else:
            self._answer(answer.status, headers, content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.server.proxy.note(self.command, status)
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)
        self.wfile.flush()

    def _end(self) -> None:
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The client was faster.

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
