"""A restored prefix is the prefix that was computed, by every mix of means, or it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.layer_gate import LoadRejected
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.restoration import Restoration, Sources
from services.worker.restore.staging import StagingMemory
from shared.errors import InvariantViolated
from tests.engine_driver import Request, decode_greedily, random_prompt, run_step
from tests.unit.worker.restore.restoring import Prefix, beside
from tests.unit.worker.restore.saved import CPU, kv_of, shape_of

LoadRunner = Callable[..., ModelRunner]


def restore(restoration: Restoration) -> None:
    """Restore all, transmission beside computation."""
    beside(restoration.run)
    restoration.begin()
    restoration.wait_all()
    restoration.finish()


def answer(prefix: Prefix, suffix: list[int], *, gate: Restoration | None = None) -> list[int]:
    """Twenty greedy tokens after the prefix and a few more tokens, given the KV that is (or comes) there."""
    request = Request([*prefix.tokens, *suffix], prefix.table, computed=prefix.length)
    logits = run_step(prefix.runner, [(request, len(suffix))], gate=gate)
    request.tokens.append(int(logits[0].argmax()))
    decode_greedily(prefix.runner, [request], chunks=[1], new_tokens=20)
    return request.output


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama_mha", "float32"), ("gemma2", "float32"), ("gemma2", "bfloat16"), ("opt", "bfloat16")]
)
def test_the_answer_is_that_of_recomputation(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Restored while the next prompt runs: the KV equals that of before to the bit, and so does every greedy token."""
    runner = load_runner(family, dtype=dtype)
    prefix = Prefix.computed(runner, 150, chunks=[64, 50], decoded=36)
    suffix = random_prompt(7, seed=2)
    expected = answer(prefix, suffix)
    prefix.wipe()
    restoration = prefix.restoration(LayerMix(0, runner.geometry.layers, 0))

    beside(restoration.run)
    restoration.begin()
    found = answer(prefix, suffix, gate=restoration)
    restoration.finish()

    assert found == expected
    assert torch.equal(kv_of(runner, prefix.table, prefix.length), prefix.kv)


@pytest.mark.parametrize("seed", range(5))
def test_any_boundaries(seed: int, load_runner: LoadRunner) -> None:
    """Whatever chunks a prefix was computed in, what part of it is restored, and how many buffers there are."""
    random = np.random.default_rng(seed)
    runner = load_runner("llama", page_size=int(random.choice([1, 16, 32, 64])))
    length = int(random.integers(70, 300))
    cuts = sorted({0, length - 10, *random.integers(1, length - 10, 3).tolist()})
    chunks = np.diff(cuts).tolist()
    prefix = Prefix.computed(runner, length, chunks=chunks, decoded=10, seed=seed)
    first = int(random.integers(0, length - 1))
    prefix.wipe(first)

    restore(prefix.restoration(LayerMix(0, 3, 0), first=first, depth=int(random.integers(1, 4))))

    assert torch.equal(kv_of(runner, prefix.table, length), prefix.kv)


class _Steps:
    """A source that reads a layer only when it may, and tells when it has."""

    def __init__(self, plain: Any, layers: int) -> None:
        self.plain, self.tokens = plain, plain.tokens
        self.may = [threading.Event() for _ in range(layers)]
        self.began = [threading.Event() for _ in range(layers)]

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        self.began[layer].set()
        assert self.may[layer].wait(30)
        self.plain.read(layer, start, end, into)


def test_a_layer_waits_for_itself_alone(load_runner: LoadRunner) -> None:
    """Layer 0 is restored while layer 1 is on its way, and layer 1 begins before layer 0 is projected."""
    runner = load_runner("llama")
    prefix = Prefix.computed(runner, 64, chunks=[64])
    prefix.wipe()
    source = _Steps(prefix.source(0), 3)
    restoration = prefix.restoration(LayerMix(0, 3, 0), hidden=source)
    beside(restoration.run)

    source.may[0].set()
    assert source.began[1].wait(30)
    restoration.wait(0)

    assert torch.equal(kv_of(runner, prefix.table, 64)[0], prefix.kv[0])
    assert kv_of(runner, prefix.table, 64)[1].isnan().all()
    source.may[1].set()
    source.may[2].set()
    restoration.wait_all()
    restoration.finish()


def test_buffers_are_not_overwritten(load_runner: LoadRunner) -> None:
    """With one buffer layer 1 is read only after layer 0 has been projected."""
    runner = load_runner("llama")
    prefix = Prefix.computed(runner, 64, chunks=[64])
    prefix.wipe()
    source = _Steps(prefix.source(0), 3)
    for event in source.may:
        event.set()
    restoration = prefix.restoration(LayerMix(0, 3, 0), hidden=source, depth=1)
    beside(restoration.run)
    assert source.began[0].wait(30)
    restoration._gate.wait(0)
    assert not source.began[1].is_set()

    restoration.wait_all()
    restoration.finish()

    assert torch.equal(kv_of(runner, prefix.table, 64), prefix.kv)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_torn_piece_is_refused(layer: int, load_runner: LoadRunner) -> None:
    """The step that waits for it ends with an error; nothing is served from it."""
    runner = load_runner("llama")
    prefix = Prefix.computed(runner, 150, chunks=[150])
    prefix.pieces[1].rows[layer, 3, 5] ^= 4
    prefix.wipe()
    restoration = prefix.restoration(LayerMix(0, 3, 0))
    beside(restoration.run)
    restoration.begin()

    with pytest.raises(LoadRejected, match="not what was saved"):
        answer(prefix, [7, 8, 9], gate=restoration)

    with pytest.raises(LoadRejected, match="not what was saved"):
        restoration.finish()
    assert "PiecesRefused" in (restoration.rejected or "")


def test_an_altered_page_of_kv_is_refused(load_runner: LoadRunner) -> None:
    """The layers that come back as KV are verified like any load."""
    runner = load_runner("llama")
    prefix = Prefix.computed(runner, 150, chunks=[150])
    restoration = prefix.restoration(LayerMix(0, 1, 2))
    prefix.host[4, 2, 0, 11] ^= 1
    beside(restoration.run)

    with pytest.raises(LoadRejected, match="layer 2 of host page 4"):
        restoration.wait_all()
    with pytest.raises(LoadRejected):
        restoration.finish()


def test_what_is_recomputed_alone_waits_for_no_transfer(load_runner: LoadRunner) -> None:
    """The thread that transmits has its turn when everything is done: that gives nothing up."""
    prefix = Prefix.computed(load_runner("llama"), 96, chunks=[96])
    prefix.wipe()
    restoration = prefix.restoration(LayerMix(3, 0, 0))

    def late() -> None:
        restoration._cancelled.wait()
        restoration.run()

    beside(late)
    restoration.begin()
    restoration.wait_all()
    restoration.finish()

    assert torch.equal(kv_of(prefix.runner, prefix.table, prefix.length), prefix.kv)


def test_what_is_given_up_ends(load_runner: LoadRunner) -> None:
    """A step that failed elsewhere leaves layers unread: finishing ends the transfer, which waits for a buffer."""
    prefix = Prefix.computed(load_runner("llama"), 64, chunks=[64])
    restoration = prefix.restoration(LayerMix(0, 3, 0), depth=1)
    thread = beside(restoration.run)
    restoration.wait(0)

    with pytest.raises(LoadRejected):
        restoration.finish()
    thread.join(30)

    assert not thread.is_alive()


def test_a_late_source_is_given_up(load_runner: LoadRunner) -> None:
    """Past its time the gate closes for good."""
    prefix = Prefix.computed(load_runner("llama"), 64, chunks=[64])
    source = _Steps(prefix.source(0), 3)
    restoration = prefix.restoration(LayerMix(0, 3, 0), hidden=source, timeout_s=0.01)
    beside(restoration.run)

    with pytest.raises(LoadRejected, match="longer than"):
        restoration.wait(0)
    for event in source.may:
        event.set()
    with pytest.raises(LoadRejected):
        restoration.finish()


@pytest.mark.parametrize("mix", [LayerMix(1, 1, 1), LayerMix(0, 2, 1), LayerMix(0, 0, 3), LayerMix(1, 1, 2)], ids=str)
def test_what_a_mix_needs_must_be_given(mix: LayerMix, load_runner: LoadRunner) -> None:
    """A source that is missing, or a mix for another number of layers, is the caller's mistake."""
    prefix = Prefix.computed(load_runner("llama"), 64, chunks=[64])
    whole = prefix.restoration(LayerMix(0, 3, 0))

    staging = StagingMemory(1, CPU)
    with pytest.raises(InvariantViolated):
        Restoration(prefix.runner, whole._projection, whole._segment, mix, Sources(), staging=staging, timeout_s=1.0)


def test_staging_must_hold_one_layer(load_runner: LoadRunner) -> None:
    """Memory for less than a layer of the prefix is the caller's mistake; more than the layers need is not used."""
    shape = shape_of(load_runner("llama"))

    with pytest.raises(InvariantViolated, match="cannot stage"):
        StagingMemory(64 * shape.row_bytes - 1, CPU).buffers(shape, 64, 3)

    assert StagingMemory(9 * 64 * shape.row_bytes, CPU).buffers(shape, 64, 3)._depth == 3


@pytest.mark.parametrize(
    ("bytes_of_rows", "multiple", "rows"),
    [(200, 16, 96), (32, 16, 16), (31, 16, 16), (15, 16, 0), (9, 1, 4), (1, 1, 1)],
)
def test_two_buffers_where_they_fit(bytes_of_rows: int, multiple: int, rows: int, load_runner: LoadRunner) -> None:
    """As many whole pages at once as let transmission run ahead of projection, or one page."""
    shape = shape_of(load_runner("llama"))

    assert StagingMemory(bytes_of_rows * shape.row_bytes, CPU).rows(shape, multiple) == rows
