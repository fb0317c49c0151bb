"""``docs/how-to/upgrade.md``, tried: a cell of release 0.1.0 is stopped, and today's starts where it was."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.scheduler import replay
from shared.versions import FORMATS
from tests.checkpoints import make_checkpoint
from tests.idle import hears_of_chunks, settled, status_at
from tests.integration.earlier_release import EarlierRelease, NoHistory, unpack
from tests.reference import Reference
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig, to_flags

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CHUNK_TOKENS = 64
PROMPTS = tuple([first, *range(20, 20 + 2 * CHUNK_TOKENS)] for first in (7, 8))
CHUNKS = 2 * len(PROMPTS)
ANSWER_TOKENS = 6


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


def events(cell: RunningCell, name: str) -> dict[str, dict[str, Any]]:
    """The last line of each event in a child's log."""
    lines = [json.loads(line) for line in cell.logs(name).splitlines() if line.startswith("{")]
    return {line["event"]: line for line in lines}


def test_a_stopped_cell_of_the_earlier_release_is_started_by_this_one(earlier: EarlierRelease, tmp_path: Path) -> None:
    """On the same data and disk folders: the same tokens, the prefixes from the disk, and streams folded anew."""
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
    assert (from_disk_at_first, from_disk) == (0, CHUNKS * CHUNK_TOKENS)
    # The snapshot is of a state that this release does not read, so what the earlier one decided is folded again.
    assert before["state"].split(".")[0] != now["state"].split(".")[0]
    assert "snapshot of version 8" in folding["snapshot_unusable"]["reason"]
    assert (folding["restored"]["snapshot_seq"], folding["restored"]["state_lost"]) == (0, False)
    assert not {"input_skipped", "step_failed", "state_lost"} & set(folding)
    assert (idle.queued, idle.running, len(idle.storages)) == (0, 0, 1)
