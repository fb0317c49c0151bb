"""Ranks in processes of their own, as one model."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedModel

from services.storage.pools import open_device_pool
from services.worker.kv.layer_gate import LoadRejected
from services.worker.kv.loads import Loads
from services.worker.kv.movers.batched import BatchedMover
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.group_runner import GroupRunner, load_group
from services.worker.parallel.orders import RankLoaded
from services.worker.parallel.parts_mover import PartsMover
from services.worker.parallel.ranks import Ranks
from shared.errors import ConfigError, OperatorError
from shared.memory import HostPoolView, unlink_all
from tests.checkpoints import make_checkpoint, save_checkpoint
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt, run_step
from tests.reference import Reference
from tests.unit.worker.parallel.groups import SHM_PREFIX, group_of, start_order
from tests.unit.worker.pools import identity_of, page_load


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Whatever a test ends with, its segments do not stay."""
    yield
    unlink_all(SHM_PREFIX)


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if SHM_PREFIX in name]


def check_tokens(group: GroupRunner, model: Path | PreTrainedModel) -> None:
    """Steps that mix chunks of prompts with decode tokens give what Hugging Face generates for each prompt alone."""
    reference, seeds = Reference(model), itertools.count()
    prompts = [
        reference.decided(partial(next, (random_prompt(length, seed) for seed in seeds)), 12) for length in (37, 5, 70)
    ]
    tables = page_tables(group, [len(prompt) + 12 for prompt in prompts], seed=3)
    requests = [
        Request(list(prompt), pages, slot=slot)
        for slot, (prompt, pages) in enumerate(zip(prompts, tables, strict=True))
    ]

    decode_greedily(group, requests, [16, 5, 33], 12)

    for request, prompt in zip(requests, prompts, strict=True):
        expected = reference.greedy(prompt, 12)
        assert request.output[: len(expected)] == expected


def loads_from(group: GroupRunner, host: HostPoolView) -> Loads:
    """What loads pages of ``host`` into the group's device pool."""
    loads = Loads(
        group.geometry,
        group.pool.pages,
        PartsMover(group.geometry, group.parts.parts, BatchedMover),
        timeout_s=60,
        clock_ns=time.monotonic_ns,
    )
    loads.attach("s", host.handle)
    return loads


def check_host_prefix(group: GroupRunner) -> None:
    """A prefix that was backed up and loaded again, layer by layer beside the step, gives the same logits; where its
    load fails the step ends as one that is thrown away, and the next one is right.
    """
    prompt, labels = random_prompt(40, seed=9), ["a", "b"]
    first = Request(list(prompt), np.array([3, 9, 5], dtype=np.int32))
    run_step(group, [(first, 32)])
    expected = run_step(group, [(first, 8)])
    host = HostPoolView.create(SHM_PREFIX, group.geometry, 4)
    view = open_device_pool(group.pool.handle())
    for page, (device, label) in enumerate(zip((3, 9), labels, strict=True)):
        view.copy_run((device, page, 1), host.pages)
        host.seal_page(page, identity_of(label))
    loads = loads_from(group, host)

    transfer = loads.start([page_load([0, 1], [20, 21], labels)])
    again = Request(list(prompt), np.array([20, 21, 22], dtype=np.int32), computed=32)
    found = run_step(group, [(again, 8)], gate=transfer.gate)

    assert not transfer.finish().failures
    assert torch.equal(found, expected)
    host.pages[1, 1, 5] ^= 1
    failing = loads.start([page_load([0, 1], [24, 25], labels)])
    third = Request(list(prompt), np.array([24, 25, 26], dtype=np.int32), computed=32)
    with pytest.raises(LoadRejected):
        run_step(group, [(third, 8)], gate=failing.gate)
    assert failing.finish().failures
    repeated = Request(list(prompt), np.array([3, 9, 22], dtype=np.int32), computed=32)
    assert torch.equal(run_step(group, [(repeated, 8)]), expected)
    loads.close()
    view.close()
    host.unlink()


def test_two_ranks_answer_as_one_does_until_one_of_them_dies(tmp_path: Path) -> None:
    """Biases, a KV head for each query, prefixes on device and host. Then whoever watches is told at once; a step
    raises; no process and no memory stays.
    """
    config = AutoConfig.from_pretrained(make_checkpoint("qwen2", tmp_path / "grouped"))
    config.num_key_value_heads = config.num_attention_heads
    model = save_checkpoint(config, tmp_path / "model")
    told, lost = threading.Event(), []

    with group_of(model, 2) as group:
        assert group.geometry.kv_heads == 4
        assert len(group.weight_bytes) == 2
        check_tokens(group, model)
        check_host_prefix(group)
        pids = list(group.rank_pids.values())

        def note(reason: Exception) -> None:
            lost.append(reason)
            told.set()

        group.on_lost(note)
        os.kill(pids[0], signal.SIGKILL)
        assert told.wait(60)
        with pytest.raises(GroupLost, match="rank 1 ended with exit code -9"):
            group.warm_up()

    assert len(lost) == 1
    assert not segments()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_two_ranks_answer_as_one_does_until_one_of_them_hangs(tmp_path: Path) -> None:
    """Norms of heads, and a KV head for two queries. After the time that ranks wait for one another the group ends,
    and the one that hangs is killed.
    """
    model = make_checkpoint("qwen3", tmp_path / "model")

    with group_of(model, 2, timeout_ms=77_000) as group:
        check_tokens(group, model)
        check_host_prefix(group)
        assert dist.group.WORLD is not None
        exchanges = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert exchanges.options._timeout == timedelta(seconds=77)
        exchanges._set_default_timeout(timedelta(seconds=1))  # It is waited out.
        (pid,) = group.rank_pids.values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupLost):
            group.warm_up()

    assert not Path(f"/proc/{pid}").exists()
    assert not segments()


def test_four_ranks_share_two_kv_heads(tmp_path: Path) -> None:
    """Tied embeddings too, whose head rank 0 has alone."""
    model = make_checkpoint("llama3", tmp_path / "model")

    with group_of(model, 4) as group:
        check_tokens(group, model)
        check_host_prefix(group)

    assert not segments()


def test_a_group_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A pool that does not fit is refused, and nothing stays."""
    model = make_checkpoint("llama", tmp_path / "model")

    with pytest.raises(ConfigError, match="too small"):
        load_group(start_order(model, 2), device_kv_bytes=0, pages=1)

    assert not segments()


def test_the_rank_that_refuses_to_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason, though another rank was killed for it and is asked first."""
    start = subprocess.Popen

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """The first rank is a process that does nothing until it is killed."""
        monkeypatch.setattr(subprocess, "Popen", start)
        return start(["sleep", "600"], **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    made = Ranks(
        [start_order(tmp_path / "nothing", 4, rank=1), start_order(tmp_path / "nothing", 4, rank=2)], timeout_s=60
    )
    try:
        with pytest.raises(OperatorError, match="rank 2: UnsupportedModel"):
            made.collect(RankLoaded)
    finally:
        made.close()
