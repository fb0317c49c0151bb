"""Models that attend by code of their own: what they answer over the pool, and what cannot be had of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MoshiConfig, XLMConfig

from bench.model_support.tiny_configs import tiny_configs
from bench.model_support.trial import ITS_OWN, PROMPT_TOKENS, Outcome, save_random, try_type
from services.worker.engine import own_attention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.found_model import HIDING_WINDOWS, find_model
from services.worker.engine.lockstep import JoinedLayer
from services.worker.engine.model_loading import load_config
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.own_attention import OwnAttention, in_order
from services.worker.engine.packed_experts import PackedExperts
from services.worker.engine.packed_linear import PackedLinear
from services.worker.engine.probe import LayoutProbe
from services.worker.kv.layer_gate import LoadRejected
from services.worker.kv.planes import LatentsKept, RowsKept
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared.errors import InvariantViolated, UnsupportedModel
from tests.checkpoints import save_checkpoint
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.unit.worker.engine.answers import assert_answers_as
from tests.unit.worker.engine.test_layer_kinds import load

KINDS = ("bloom", "falcon", "doge", "indexed", "minimax_m3")


@pytest.fixture
def bloom(checkpoint: Callable[[str], Path]) -> Any:
    runner = load(checkpoint("bloom"), 16)
    yield runner
    runner.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_librarys(
    kind: str, page_size: int, checkpoint: Callable[[str], Path], reference: Callable[..., Any]
) -> None:
    """However their prompts are cut and placed."""
    runner = load(checkpoint(kind), page_size)

    assert runner.attends_itself
    assert_answers_as(reference(kind), runner)


LENGTHS = (37, 20, 55, 8, 61, 33, 16, 40)


def decoding(runner: ModelRunner) -> list[Request]:
    """Eight requests whose next row is one of decoding."""
    tables = page_tables(runner, [length + 8 for length in LENGTHS], seed=3)
    requests = [
        Request(random_prompt(length, seed=length), table, slot=number)
        for number, (length, table) in enumerate(zip(LENGTHS, tables, strict=True))
    ]
    for each in requests:
        run_step(runner, [(each, len(each.tokens))])
        each.tokens.append(7)
    return requests


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[JoinedLayer]:
    """How often each layer with weights is computed for several requests."""
    found: Counter[JoinedLayer] = Counter()
    together = JoinedLayer.together

    def counted(self: JoinedLayer, calls: Any) -> Any:
        found[self] += 1
        return together(self, calls)

    monkeypatch.setattr(JoinedLayer, "together", counted)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_eight_requests_reads_weights_once(
    kind: str, checkpoint: Callable[[str], Path], passes: Counter[JoinedLayer]
) -> None:
    """All linear layers and experts, those of MLPs among them; each row has the bits that it has alone."""
    runner = load(checkpoint(kind), 16)
    alone = torch.cat([run_step(runner, [(each, 1)]) for each in decoding(runner)])
    requests = decoding(runner)
    assert not passes

    together = run_step(runner, [(each, 1) for each in requests])

    assert torch.equal(together, alone)
    joined = [module.forward for module in runner.model.modules() if isinstance(module.forward, JoinedLayer)]
    assert passes == Counter(dict.fromkeys(joined, 1))
    packed = [module for module in runner.model.modules() if isinstance(module, PackedLinear | PackedExperts)]
    assert len(joined) == len(packed)
    assert not any(
        type(module) is torch.nn.Linear for name, module in runner.model.named_modules() if "indexer" not in name
    )
    runner.close()


def test_requests_that_decode_beside_a_chunk_are_computed_together(
    bloom: ModelRunner, passes: Counter[JoinedLayer]
) -> None:
    """The chunk is a pass by itself; tokens of all have the bits that they have in steps of their own."""
    first, second, third = decoding(bloom)[:3]
    chunk = Request(random_prompt(30, seed=9), page_tables(bloom, [250, 40], seed=None)[1])
    apart = torch.cat([run_step(bloom, [(each, rows)]) for each, rows in ((first, 1), (chunk, 30), (second, 1))])
    for each in (first, second, chunk):
        each.computed = 0 if each is chunk else each.computed - 1

    logits = run_step(bloom, [(first, 1), (chunk, 30), (second, 1), (third, 1)])

    assert torch.equal(logits[:3], apart)
    assert set(passes.values()) == {1}


def test_requests_in_lockstep_hold_no_more_than_a_part_of_the_weights(
    bloom: ModelRunner, passes: Counter[JoinedLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copies its K and V; where two would hold too much, each is computed alone."""
    requests = decoding(bloom)
    width = 2 * 4 * 2 * 64  # K and V of all heads, twice, in float32.
    monkeypatch.setattr(own_attention, "LEAST_HELD_BYTES", 0)
    bloom._fused = OwnAttention(bloom.model, bloom.pool, model_bytes=8 * width * (38 + 21 + 56))

    run_step(bloom, [(each, 1) for each in requests])

    assert set(passes.values()) == {3}  # 38 + 21 + 56; 9 + 62 + 34; 17 + 41.


def test_a_load_that_fails_ends_all_requests_of_a_step(bloom: ModelRunner) -> None:
    """And the next step is computed as ever."""

    class Gate:
        def wait(self, layer: int) -> None:
            if layer == 1:
                raise LoadRejected("lost")

    requests = decoding(bloom)
    with pytest.raises(LoadRejected):
        run_step(bloom, [(each, 1) for each in requests], gate=Gate())

    again = run_step(bloom, [(each, 1) for each in requests])
    for each in requests:
        each.computed -= 1
    assert torch.equal(again, run_step(bloom, [(each, 1) for each in requests]))


def test_a_page_may_be_filled_and_be_a_prefix_in_one_step(bloom: ModelRunner, reference: Callable[..., Any]) -> None:
    """Whichever request stands first in the step."""
    prompt = random_prompt(48, seed=5)
    tables = page_tables(bloom, [48, 48], seed=6)
    tables[1][:2] = tables[0][:2]
    first, second = (Request(list(prompt), table) for table in tables)
    second.computed = 32

    logits = run_step(bloom, [(second, 16), (first, 32)])

    with torch.inference_mode():
        expected = reference("bloom")(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected[[47, 31]], atol=1e-4, rtol=1e-4)


def test_requests_that_wait_for_one_another_are_a_fault() -> None:
    """No scheduler makes such a step."""
    one, other = np.array([0, 1], dtype=np.int32), np.array([1, 0], dtype=np.int32)

    with pytest.raises(InvariantViolated, match="wait for one another"):
        list(in_order([Segment(4, 4, one), Segment(4, 4, other)], 4))


def test_rows_that_nobody_asks_for_have_no_logits(bloom: ModelRunner) -> None:
    """A chunk that ends no prompt; and rows in any order."""
    tables = page_tables(bloom, [20, 20], seed=6)
    segments = [Segment(20, 0, table) for table in tables]
    meta = ForwardMeta.build(segments, 16, "cpu")
    ids, positions = torch.tensor([*random_prompt(20, 1), *random_prompt(20, 2)]), torch.arange(20).repeat(2)

    nothing = bloom.forward(ids, positions, meta, torch.empty(0, dtype=torch.int64))
    every = bloom.forward(ids, positions, meta, torch.arange(40))
    some = bloom.forward(ids, positions, meta, torch.tensor([39, 3, 25]))

    assert nothing.shape == (0, bloom.vocab_size)
    torch.testing.assert_close(some, every[[39, 3, 25]], atol=1e-4, rtol=1e-4)


def test_each_layer_waits_for_its_loads(bloom: ModelRunner) -> None:
    """Before it reads what another has left."""
    waited: list[int] = []

    class Gate:
        def wait(self, layer: int) -> None:
            waited.append(layer)

    run_step(bloom, [(Request(random_prompt(5, 1), page_tables(bloom, [8], seed=1)[0]), 5)], gate=Gate())

    assert waited == [0, 1, 2]


def test_index_keys_are_kept_beside_latents(checkpoint: Callable[[str], Path]) -> None:
    """In one row a token; a layer that attends to what the one before has chosen keeps none."""
    runner = load(checkpoint("indexed"), 16)

    kept = [layer.kept for layer in runner.pool.planes.layers]
    assert kept == [LatentsKept(24, 8, 16), LatentsKept(24, 8), LatentsKept(24, 8, 16)]
    assert runner.pool.planes.contents == "latents and index keys"
    assert runner.pool.planes.content_bytes == 16 * 4 * (48 + 32 + 48)
    runner.close()


def test_index_keys_are_kept_behind_k_and_v(checkpoint: Callable[[str], Path]) -> None:
    """In one row a token, where K and V have several heads: MiniMax-M3, whose first layers have no indexer."""
    runner = load(checkpoint("minimax_m3"), 16)

    kept = [layer.kept for layer in runner.pool.planes.layers]
    assert kept == [RowsKept(2, 16, 16), RowsKept(2, 16, 16, 16), RowsKept(2, 16, 16, 16)]
    assert runner.pool.planes.contents == "rows of K and V and index keys"
    assert runner.pool.planes.content_bytes == 16 * 4 * (64 + 80 + 80)
    runner.close()


def test_other_steps_are_refused(bloom: ModelRunner) -> None:
    """Nothing takes part of such a model's attention for the whole."""
    one = torch.zeros(1, dtype=torch.int64)

    assert isinstance(bloom._fused, OwnAttention)
    with pytest.raises(UnsupportedModel, match="bloom attends by code of its own"):
        bloom.run(one, one, LayoutProbe(), one)
    with pytest.raises(UnsupportedModel, match="bloom attends by code of its own"):
        _ = bloom.attention
    with pytest.raises(HiddenStatesUnsupported, match="BloomForCausalLM attends by code of its own"):
        KvProjection(bloom)


def test_a_model_without_the_librarys_cache_is_refused(tmp_path: Path) -> None:
    """With the reasons against both ways."""
    config = XLMConfig(vocab_size=300, emb_dim=64, n_layers=2, n_heads=4, max_position_embeddings=256, causal=True)
    path = save_checkpoint(config, tmp_path)

    with pytest.raises(
        UnsupportedModel,
        match=r"made 0 calls through the attention interface; xlm has 2 layers but gave the library's cache K and V 0",
    ):
        load(path)


def test_a_window_that_only_the_librarys_cache_knows_is_refused(tmp_path: Path) -> None:
    """Moshi's masks hide nothing, and the cache that ``generate`` makes drops what is before the window."""
    config = MoshiConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16, ffn_dim=96,
        max_position_embeddings=256, sliding_window=24,
    )  # fmt: skip
    path = save_checkpoint(config, tmp_path)

    with pytest.raises(UnsupportedModel, match="layer 0 of moshi has window None, configured is 24"):
        load(path)


@pytest.mark.parametrize("kind", HIDING_WINDOWS)
def test_masks_of_these_models_hide_what_is_before_a_window(kind: str, tmp_path: Path) -> None:
    """Answers over prompts longer than the windows are those of ``generate``, whose cache drops it."""
    assert try_type(kind, tmp_path, seed=1) == Outcome("served", ITS_OWN)
    config = load_config(tmp_path / "0")
    assert 0 < config.sliding_window < PROMPT_TOKENS


def test_a_model_that_needs_a_mask_attends_itself(tmp_path: Path) -> None:
    """MPT raises where it is handed none, as behind the attention interface."""
    path = save_random(next(iter(tiny_configs("mpt"))), tmp_path, seed=0)

    found = find_model(path, load_config(path), [None, None], dtype="float32", device="cpu", context=64, page_size=16)

    assert found.attends_itself
