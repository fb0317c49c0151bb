"""``docs/how-to/upgrade.md``, tried: a cell of release 0.1.0 is stopped, and today's starts where it was."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.scheduler import replay
from shared.versions import FORMATS
from tests.checkpoints import make_checkpoint
from tests.idle import hears_of_chunks, settled, status_at
from tests.integration.earlier_release import EarlierRelease, NoHistory, unpack
from tests.integration.scheduler_process import SchedulerProcess
from tests.reference import Reference
from tests.waiting import holds
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig, to_flags

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 64
PROMPTS = tuple([first, *range(20, 20 + 2 * CHUNK_TOKENS)] for first in (7, 8))
CHUNKS = 2 * len(PROMPTS)
ANSWER_TOKENS = 6
LOAD_TOKENS = 24


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> EarlierRelease:
    """Release 0.1.0."""
    try:
        return EarlierRelease(unpack(tmp_path_factory.mktemp("release-0.1.0")))
    except NoHistory as reason:
        pytest.skip(str(reason))


def answers(cell: RunningCell) -> tuple[list[list[int]], int]:
    """Token ids of a greedy answer to each prompt, and how many tokens of the prompts came from a disk."""
    told: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        body = {"model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        url = f"{cell.base_url}/v1/completions"
        answered = httpx.post(url, json=body | {"return_token_ids": True}, timeout=120, trust_env=False)
        told.append(answered.raise_for_status().json())
    disk_tokens = sum(each["usage"]["prompt_tokens_details"]["disk_tokens"] for each in told)
    return [each["choices"][0]["token_ids"] for each in told], disk_tokens


class Load:
    """Clients that ask for the same prompts again and again until told to stop, and remember what they got."""

    def __init__(self, url: str, clients: int) -> None:
        self.answers: list[tuple[int, list[int]]] = []  # Which prompt, and its tokens.
        self.failures: list[str] = []
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        place = client
        while not self._is_over.is_set():
            place = (place + 1) % len(PROMPTS)
            body = {"model": "model", "prompt": PROMPTS[place], "max_tokens": LOAD_TOKENS, "temperature": 0}
            try:
                got = httpx.post(self._url, json=body | {"return_token_ids": True}, timeout=120, trust_env=False)
                self.answers.append((place, got.raise_for_status().json()["choices"][0]["token_ids"]))
            except httpx.HTTPError as error:
                self.failures.append(repr(error))

    def has(self, more: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.answers) + more
        assert holds(lambda: len(self.answers) >= wanted or bool(self.failures))

    def end(self) -> None:
        """Ask for nothing more, and wait for what was asked for."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=130)


def events(cell: RunningCell, name: str) -> dict[str, dict[str, Any]]:
    """The last line of each event in a child's log."""
    lines = [json.loads(line) for line in cell.logs(name).splitlines() if line.startswith("{")]
    return {line["event"]: line for line in lines}


def test_a_stopped_cell_of_the_earlier_release_is_started_by_this_one(earlier: EarlierRelease, tmp_path: Path) -> None:
    """On the same data and disk folders: the same tokens, streams folded anew, no KV that other kernels computed."""
    before, now = earlier.formats(), {each.name: each.version for each in FORMATS}
    model = make_checkpoint("llama", tmp_path / "model")
    reference = Reference(model)
    expected = [reference.greedy(prompt, ANSWER_TOKENS) for prompt in PROMPTS]
    settings = tmp_path / "thermocline.toml"
    settings.write_text('[scheduler]\nprefetch_wait = "full"\n')
    config = SupervisorConfig(
        model=str(model),
        data_dir=str(tmp_path / "data"),
        disk_dir=(str(tmp_path / "disk"),),
        disk_kv_bytes=64 * 2**20,
        device_kv_bytes=8 * 2**20,
        host_kv_bytes=8 * 2**20,
        page_size=16,
        device="cpu",
        dtype="float32",
        port=0,
        threads=1,
        grace_s=60.0,
    )
    recording = tmp_path / "before.tcrec"
    with earlier.up(*to_flags(config), "--config", str(settings)) as cell:
        first, from_disk_at_first = answers(cell)
        asyncio.run(hears_of_chunks(lambda: status_at(cell.nats_url), CHUNKS, timeout_s=120))
        recorded = earlier.run("record", "--nats", cell.nats_url, "--out", str(recording))
        stopped = cell.stop()
    for log in (tmp_path / "data" / "logs").iterdir():
        log.unlink()

    with running(config, config_file=settings) as cell:
        asyncio.run(hears_of_chunks(lambda: status_at(cell.nats_url), CHUNKS, timeout_s=120))
        second, from_disk = answers(cell)
        idle = asyncio.run(settled(lambda: status_at(cell.nats_url), workers=1, timeout_s=120))
        folding = events(cell, "scheduler")

    assert (stopped, recorded.returncode) == (0, 0), recorded.stderr
    assert replay.replay(recording).difference is None
    assert first == second == expected
    # The earlier release computed before the first epoch of numerics.
    assert (from_disk_at_first, from_disk) == (0, 0)
    # The snapshot is of a state that this release does not read, and what the earlier one decided is not decided again.
    assert before["state"].split(".")[0] != now["state"].split(".")[0]
    assert folding["state_lost"]["because"] == "another release folded the end of the stream"
    assert folding["restored"]["state_lost"]
    assert not {"input_skipped", "step_failed"} & set(folding)
    assert (idle.queued, idle.running, len(idle.storages)) == (0, 0, 1)


def has_begun_anew(scheduler: SchedulerProcess) -> bool:
    """Whether it leads, and has given up what 0.1.0 decided."""
    log = scheduler.log()
    assert '"state_lost": false' not in log, "it has gone on from what 0.1.0 decided"
    return '"event": "state_lost"' in log


def ended_until_it_leads(scheduler: SchedulerProcess, cell: RunningCell, number: signal.Signals) -> int:
    """End that of 0.1.0 until today's has taken over; returns how often the old one has led until then.

    What its supervisor starts again may be first, and then goes on as if nothing had been: it is ended once more.
    """
    for _ in range(4):
        led = cell.logs("scheduler").count('"lease_taken"')
        cell.kill("scheduler", number)
        assert holds(
            lambda: has_begun_anew(scheduler) or cell.logs("scheduler").count('"lease_taken"') > led  # noqa: B023
        )
        if has_begun_anew(scheduler):
            return led
    raise AssertionError("the old scheduler came back first four times")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_the_scheduler_alone_is_upgraded_under_load(
    earlier: EarlierRelease, tmp_path: Path, number: signal.Signals
) -> None:
    """Today's stands by beside that of 0.1.0, which ends in either way and comes back as a standby of its own release.

    Each answer is right, and each request ends: what ran is begun again behind the tokens that the gateway has. The old
    standby is left alone, and takes over neither from the first of today's, which is killed, nor from the next one.
    """
    model = make_checkpoint("llama", tmp_path / "model")
    reference = Reference(model)
    expected = [reference.greedy(prompt, LOAD_TOKENS) for prompt in PROMPTS]
    config = SupervisorConfig(
        model=str(model),
        data_dir=str(tmp_path / "data"),
        device_kv_bytes=8 * 2**20,
        host_kv_bytes=8 * 2**20,
        page_size=16,
        device="cpu",
        dtype="float32",
        port=0,
        threads=1,
    )
    with earlier.up(*to_flags(config)) as cell:
        scheduler, successor = (SchedulerProcess(cell.nats_url, tmp_path, name) for name in ("today", "next"))
        try:
            scheduler.start()
            load = Load(f"{cell.base_url}/v1/completions", clients=3)
            load.has(6)
            before = len(load.answers)
            led = ended_until_it_leads(scheduler, cell, number)
            load.has(6)
            # That of 0.1.0 would take over within a second; the successor takes longer to start.
            assert holds(lambda: "cannot_stand_by_yet" in cell.logs("scheduler"))
            scheduler.end(signal.SIGKILL)
            successor.start()
            load.has(6)
            load.end()
            ended = successor.end(signal.SIGTERM)
            taken_by_old = cell.logs("scheduler").count('"lease_taken"')
        finally:
            scheduler.close()
            successor.close()

    assert load.failures == []
    assert all(tokens == expected[place] for place, tokens in load.answers)
    assert len(load.answers) > before >= 6
    assert "another release folded the end of the stream" in scheduler.log()
    assert "restored" in successor.log()
    assert not any("step_failed" in each.log() for each in (scheduler, successor))
    assert (ended, taken_by_old) == (0, led)
