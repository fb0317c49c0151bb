"""Commands that talk to a broker, while none is there: one line, an exit code, no log and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thermocline.__main__ import main

COMMANDS = (
    "cache ls",
    "cache stat",
    "cache divergences",
    "cache unpin kept",
    "cache flush",
    "cache verify",
    "record --out {folder}/cell.tcrec",
    "skip-input 5",
)
GATEWAY_COMMANDS = (
    "cache unpin kept --url {url}",
    "cache pin --prompt text --url {url}",
    "trace send {folder}/trace.jsonl --url {url}",
    "load --workload burst --url {url}",
    "top --once --url {url}",
)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which every connection is refused, for as long as the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands wait for long enough to be refused, and are told of no cell by the environment."""
    for name in [name for name in os.environ if name.startswith("THERMOCLINE_")]:
        monkeypatch.delenv(name)
    for module in ("thermocline.cache.connection", "services.scheduler.record", "services.scheduler.skip_input"):
        monkeypatch.setattr(f"{module}.CONNECT_S", 1.0)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_broker_that_is_away_is_one_line(
    line: str, closed_port: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its address and the reason, and exit code 1."""
    url = f"nats://127.0.0.1:{closed_port}"
    code = main([*line.format(folder=tmp_path).split(), "--nats", url])

    out, err = capfd.readouterr()
    told = f"thermocline {line.split(maxsplit=1)[0]}: no broker answers at {url} within 1 s: connection refused\n"
    assert (code, out, err) == (1, "", told)


@pytest.mark.parametrize("line", GATEWAY_COMMANDS)
def test_a_gateway_that_is_away_is_one_line(
    line: str, closed_port: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its address, and an exit code that says so."""
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1]}\n')
    (tmp_path / "prompts.txt").write_text("text\n")
    url = f"http://127.0.0.1:{closed_port}"
    code = main(line.format(folder=tmp_path, url=url).split())

    out, err = capfd.readouterr()
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"thermocline {line.split(maxsplit=1)[0]}: ")
    assert url in err


def test_nothing_is_logged_in_a_process_of_its_own(closed_port: int) -> None:
    """As a shell starts it: debug logs of the client are not for its reader."""
    command = [sys.executable, "-m", "thermocline", "cache", "stat", "--nats", f"nats://127.0.0.1:{closed_port}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("thermocline cache: no broker answers at ")
