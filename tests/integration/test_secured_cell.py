"""A cell as ``thermocline up`` starts it: every process under its own user, and no prompt in any log."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shared import subjects
from shared.bus.nats_bus import connect
from shared.errors import ConfigError
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

pytestmark = pytest.mark.integration

MARK = "Quixotry"
ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """Two schedulers, a disk tier, and logs that say all they can."""
    config = SupervisorConfig(
        port=0,
        threads=1,
        schedulers=2,
        disk_dir=(str(tmp_path_factory.mktemp("disk")),),
        device_kv_bytes=16 * 2**20,
        host_kv_bytes=32 * 2**20,
        log_level="debug",
        grace_s=20.0,
    )
    with running(config) as running_cell:
        yield running_cell


def logs(cell: RunningCell) -> dict[str, str]:
    files = (cell.data_dir / "logs").iterdir()
    return {"up": cell.output} | {file.stem: file.read_text(errors="replace") for file in files}


def ask(cell: RunningCell) -> list[str]:
    """Answers to a marked prompt in each form in which it may come, among them requests that fail."""
    text = f"{MARK} is what the prompt says. " * 40
    chat = [{"role": "user", "content": text}]
    answers = []
    with httpx.Client(base_url=cell.base_url, timeout=120, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        common = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        for path, body in (
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/chat/completions", {"messages": chat, "explain": True}),
            ("/v1/completions", {"prompt": text, "stream": True}),
            ("/v1/completions", {"prompt": [text, text], "n": 2}),
        ):
            answers.append(client.post(path, json=common | body).raise_for_status().text)
        refused: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/completions", {"prompt": text * 2000}),
            ("/v1/completions", {"prompt": text, "temperature": text}),
            ("/v1/chat/completions", {"messages": [{"role": text, "content": text}]}),
            (f"/v1/{MARK}", {}),
        )
        for path, faulty in refused:
            assert client.post(path, json=common | faulty).is_client_error
        broken = client.post("/v1/completions", content=f'{{"prompt": "{MARK}', headers={"content-type": "text/json"})
        assert broken.is_client_error
    return answers


def test_nobody_is_denied_anything_and_no_log_holds_a_prompt_or_an_answer(cell: RunningCell) -> None:
    """At level debug, after answers, streams, explanations and requests that fail in every way."""
    answers = ask(cell)
    spoken = json.loads(answers[0])["choices"][0]["message"]["content"].strip()

    told = logs(cell)
    assert set(told) >= {"up", "nats", "scheduler", "scheduler-1", "storage", "worker-0", "gateway"}
    assert all(told[name] for name in ("scheduler", "worker-0", "gateway", "nats"))
    assert [name for name, text in told.items() if MARK.lower() in text.lower()] == []
    assert len(spoken) > 8  # Long enough not to stand in a log by chance.
    assert [name for name, text in told.items() if spoken in text] == []
    assert [name for name, text in told.items() if "broker_denies" in text or "ermissions Violation" in text] == []


def test_the_broker_lets_nobody_in_without_a_password(cell: RunningCell) -> None:
    """Not even on loopback; and what a command line or a log shows does not let anybody in either."""
    address = urlsplit(cell.nats_url)
    assert address.password

    with pytest.raises(ConfigError, match="does not accept our credentials"):
        asyncio.run(connect([f"nats://127.0.0.1:{address.port}"], "stranger"))

    told = logs(cell)
    assert [name for name, text in told.items() if address.password in text] == []
    shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in cell.pids().values()]
    passwords = [
        line.split('"')[1] for line in (cell.data_dir / "nats.conf").read_text().splitlines() if "password:" in line
    ]
    assert len(passwords) == 6  # The last is of the supervisor, which asks the server for its health.
    assert not any(password in line for line in shown for password in passwords)


def test_files_with_secrets_are_for_their_owner_alone(cell: RunningCell) -> None:
    """The broker's configuration, the operator's password, and the record with the broker's address."""
    for name in ("nats.conf", "operator.password", "cell.json"):
        assert stat.S_IMODE((cell.data_dir / name).stat().st_mode) == 0o600


def test_a_worker_of_this_cell_cannot_take_the_place_of_another(cell: RunningCell) -> None:
    """With the password of worker-0, the plans of worker-1 and a gateway's requests are out of reach."""
    config = (cell.data_dir / "nats.conf").read_text()
    password = config.split('user: "worker-0"')[1].split('"')[1]

    async def attempt() -> None:
        bus = await connect([f"nats://worker-0:{password}@127.0.0.1:{urlsplit(cell.nats_url).port}"], "thief")
        try:
            for subject in (subjects.worker_output("worker-1"), subjects.INPUTS):
                with pytest.raises(ConfigError, match="does not let us subscribe"):
                    await bus.subscribe(subject, _ignore)
        finally:
            await bus.close()

    asyncio.run(attempt())


async def _ignore(delivery: object) -> None: ...


def test_the_flags_that_it_prints_let_the_operator_in(cell: RunningCell) -> None:
    """As printed, behind any command that looks into the cell."""
    flags = next(line for line in cell.output.splitlines() if line.startswith("Broker: ")).split()[1:]

    done = subprocess.run(
        [sys.executable, "-m", "thermocline", "cache", "stat", *flags], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
