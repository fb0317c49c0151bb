"""A cell on the command line: what cannot be had is refused or told, and its page opens by the link that it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.waiting import until
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
STORE = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


class Empty(BaseHTTPRequestHandler):
    """An object store without objects."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


def thermocline(*arguments: str, module: str = "thermocline", **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    """A port on which nothing listens yet, and which is handed to nobody else."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cell(disk: Path, store_port: int) -> Iterator[RunningCell]:
    """A cell whose object store does not answer, and whose processes have no compiler."""
    config = SupervisorConfig(
        port=0, threads=1, device_kv_bytes=16 * 2**20, host_kv_bytes=32 * 2**20, grace_s=20.0,
        disk_dir=(str(disk),), disk_kv_bytes=8 * 2**20, remote="s3://bucket/chunks",
    )  # fmt: skip
    environ = {**STORE, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store_port}", "CC": "/nowhere/cc"}
    with running(config, environ=environ) as running_cell:
        yield running_cell


def get(cell: RunningCell, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{cell.base_url}{path}", headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def key(cell: RunningCell) -> str:
    """The key that the printed link is exchanged for, once."""
    found = re.search(rf"^Page: {re.escape(cell.base_url)}/ui#once=(\S+)$", cell.output, re.MULTILINE)
    assert found is not None, cell.output
    exchange = f"{cell.base_url}/ui/key"
    answers = [httpx.post(exchange, json={"code": found[1]}, timeout=30, trust_env=False) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 404]
    return str(answers[0].json()["admin_key"])


def test_what_is_missing_is_told_everywhere(cell: RunningCell, key: str) -> None:
    """In the lines of `up`, by the gateway with a key and without, and by the command."""
    broker = shlex.split(next(line for line in cell.output.splitlines() if line.startswith("Broker: ")))[1:]
    health = get(cell, "/health/ready")
    health_told = get(cell, "/health/ready", **{"x-admin-key": key})
    report = get(cell, "/v1/cell", **{"x-admin-key": key}).json()
    shown = thermocline("cache", "stat", *broker)
    as_json = json.loads(thermocline("cache", "stat", "--json", *broker).stdout)

    assert f"Thermocline is ready, degraded, at {cell.base_url}" in cell.output
    assert "Degraded: storage, remote: s3://bucket/chunks: " in cell.output
    assert "Degraded: worker-0, native code: portable paths replace " in cell.output
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert "bucket" not in health.text
    assert health_told.json()["degraded"][0]["reason"].startswith("s3://bucket/chunks: ")
    for degraded in (health.json()["degraded"], report["degraded"], as_json["degraded"]):
        assert [(each["component"], each["what"], each["setting"]) for each in degraded] == [
            ("storage", "remote", "--remote"),
            ("storage", "native code", ""),
            ("worker-0", "native code", ""),
        ]
    assert shown.stdout.startswith("degraded: storage, remote: s3://bucket/chunks: ")


def test_the_key_of_the_link_opens_what_no_other_key_does(cell: RunningCell, key: str) -> None:
    """And a command that is given this gateway alone finds it by itself."""
    assert get(cell, "/v1/cell").status_code == 401
    assert get(cell, "/v1/cell", **{"x-admin-key": "x" * len(key)}).status_code == 401
    assert get(cell, f"/v1/cell?key={key}").status_code == 401
    assert get(cell, "/v1/cell", **{"x-admin-key": key}).status_code == 200
    pinned = thermocline("cache", "pin", "--prompt", "word " * 200, "--name", "kept", "--url", cell.base_url)
    assert (pinned.returncode, pinned.stderr) == (0, "")
    assert thermocline("top", "--once", "--url", cell.base_url).returncode == 0


def test_the_key_is_in_no_log_and_on_no_command_line(cell: RunningCell, key: str) -> None:
    """It stands in two records and in the gateway's environment, which this user alone may read."""
    get(cell, "/v1/cell", **{"x-admin-key": key})
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*cell.pids().values(), cell.supervisor_pid)]
    holding = [path for path in cell.data_dir.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]

    assert [path.name for path in holding] == ["cell.json"]
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}
    assert not any(key.encode() in line for line in lines)
    assert key not in cell.output


def test_a_directory_of_a_running_cell_is_refused(cell: RunningCell, disk: Path) -> None:
    """By `up` with the cell that has it, and by a storage that is started alone."""
    up = thermocline("up", "--port", "0", "--disk-dir", str(disk), "--disk-kv-bytes", "8MiB")
    alone = thermocline("--disk-dir", str(disk), "--disk-kv-bytes", "8MiB", module="services.storage")

    pid = cell.pids()["storage"]
    assert (up.returncode, alone.returncode) == (2, 2)
    assert f"--disk-dir {disk} is in use by process {pid} (of the cell at {cell.base_url}" in up.stderr
    assert "Starting" not in up.stdout
    assert f"is in use by process {pid}" in alone.stdout + alone.stderr


async def test_a_store_that_answers_is_told_of_no_longer(cell: RunningCell, store_port: int) -> None:
    """Nobody need use it for that."""

    def told() -> list[str]:
        return [each["what"] for each in get(cell, "/health/ready").json()["degraded"]]

    server = ThreadingHTTPServer(("127.0.0.1", store_port), Empty)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        await until(lambda: told() == ["native code"] * 2, timeout_s=120)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.parametrize(
    ("module", "flags", "reason"),
    [
        (
            "thermocline.supervisor",
            ("--disk-dir", "{tmp}/disk", "--disk-kv-bytes", "900000TiB"),
            "--disk-kv-bytes is 900000.0 TiB, and the file",
        ),
        ("services.storage", ("--disk-dir", "{tmp}/file"), "is not a directory"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    tmp_path: Path, module: str, flags: tuple[str, ...], reason: str
) -> None:
    """Exit code 2 with the reason, of the whole cell and of a storage alone. The rules are those of
    ``tests/unit/storage/test_disk_check.py``.
    """
    (tmp_path / "file").touch()
    (tmp_path / "disk").mkdir()
    given = [flag.format(tmp=tmp_path) for flag in flags]
    port = ["--port", "0"] if module == "thermocline.supervisor" else []
    done = thermocline(*port, *given, module=module)

    assert done.returncode == 2
    assert reason.format(tmp=tmp_path) in done.stdout + done.stderr
    assert "Starting" not in done.stdout
