"""Real forward passes over what matters of a prefix."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.kept_kv import KeptInPages
from services.worker.importance.prefix_source import token_slots
from services.worker.importance.selection import Budget
from services.worker.importance.selection_failed import SelectionFailed
from shared.errors import InvariantViolated, SparsePrefixLost
from tests.checkpoints import FAMILIES
from tests.engine_driver import Request, random_prompt, run_step
from tests.unit.worker.importance.asked import Asked
from tests.unit.worker.importance.sparse_cell import OnDisk
from tests.unit.worker.runners import LoadRunner

ALL = LoadingRule(Budget(1.0))
QUARTER = LoadingRule(Budget(0.25))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*product([*FAMILIES, "llama_mha"], ["float32"]), *product(["llama", "gemma2", "llama_mha"], ["bfloat16"])],
)
def test_all_of_the_prefix_gives_the_same_bits(family: str, dtype: str, load_runner: LoadRunner) -> None:
    """Selecting everything is full attention, though K and V come from outside of the pool."""
    asked = Asked(load_runner(family, dtype=dtype), prefix=100, question=20)
    expected, source = asked.full(100, 120), asked.stored()
    asked.forget()

    prefix = ImportantPrefix(source, ALL, asked.runner.geometry.layers)

    assert torch.equal(asked.sparse(100, 120, prefix), expected)


@pytest.mark.parametrize(("start", "dtype"), [(16, "float32"), (80, "bfloat16")])
@pytest.mark.parametrize("family", [*FAMILIES, "llama_mha"])
def test_all_of_a_later_part_gives_the_same_bits(family: str, start: int, dtype: str, load_runner: LoadRunner) -> None:
    """What lies before it is attended to in the pool, and what was chosen in pages of its own, in order of position."""
    asked = Asked(load_runner(family, dtype=dtype), prefix=100, question=20)
    expected, source = asked.full(100, 120), asked.stored(start=start)
    asked.forget(start)
    free = sorted(set(range(asked.runner.pool.pages)) - set(asked.pages.tolist()))[::-3]
    kept = KeptInPages(asked.runner.pool, np.array(free[: -(-(100 - start) // 16)], dtype=np.int32))

    prefix = ImportantPrefix(source, ALL, asked.runner.geometry.layers, kept=kept)

    assert torch.equal(asked.sparse(100, 120, prefix), expected)
    assert torch.equal(asked.sparse(100, 120, prefix), expected)  # As the step is repeated.


@pytest.mark.parametrize("family", ["agreeing", "llama_mha", "gemma2"])
def test_what_was_chosen_is_the_same_in_pages_and_in_memory(family: str, load_runner: LoadRunner) -> None:
    """In the step that chooses and in later ones, with one set for all heads or one for each."""
    asked = Asked(load_runner(family), prefix=120, question=9)
    layers = asked.runner.geometry.layers
    free = sorted(set(range(asked.runner.pool.pages)) - set(asked.pages.tolist()))
    kept = KeptInPages(asked.runner.pool, np.array(free[1:3], dtype=np.int32))
    paged = ImportantPrefix(asked.stored(start=32), QUARTER, layers, kept=kept)
    memory = ImportantPrefix(asked.stored(start=32), QUARTER, layers)

    for start, end in ((120, 124), (124, 129)):
        assert torch.equal(asked.sparse(start, end, paged), asked.sparse(start, end, memory))


def test_a_prefix_that_cannot_be_read_is_named(load_runner: LoadRunner) -> None:
    """The pass ends with its name and the cause; repeated, it goes on from the layer that had not chosen."""
    asked = Asked(load_runner("agreeing"), prefix=64, question=7)
    expected = asked.sparse(64, 71, ImportantPrefix(asked.stored(), QUARTER, 3))
    source = OnDisk(asked.stored()._kv, 0)
    source.lost_from = 1
    prefix = ImportantPrefix(source, QUARTER, 3, name="r")

    with pytest.raises(SelectionFailed, match="of r could not") as failed:
        asked.sparse(64, 71, prefix)
    source.lost_from = None

    assert isinstance(failed.value.__cause__, SparsePrefixLost)
    assert (list(prefix.positions), prefix.is_complete) == ([0], False)
    assert torch.equal(asked.sparse(64, 71, prefix), expected)
    assert prefix.is_complete


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_long_questions_agree_to_rounding(family: str, load_runner: LoadRunner) -> None:
    """Behind a window, the engine leaves out keys that no row of a block sees, which rounds differently."""
    asked = Asked(load_runner(family), prefix=300, question=300)
    expected, source = asked.full(300, 600), asked.stored()
    asked.forget()

    prefix = ImportantPrefix(source, ALL, asked.runner.geometry.layers)

    torch.testing.assert_close(asked.sparse(300, 600, prefix), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "llama_mha"])
def test_later_steps_go_on_where_the_first_chose(family: str, load_runner: LoadRunner) -> None:
    """A question in chunks, and decode, see the request's own tokens in the pool and everything that was chosen."""
    asked = Asked(load_runner(family), prefix=50, question=14)
    expected, source = asked.full(50, 64), asked.stored()
    asked.forget()
    prefix = ImportantPrefix(source, ALL, asked.runner.geometry.layers)

    found = torch.cat([asked.sparse(start, end, prefix) for start, end in ((50, 60), (60, 63), (63, 64))])

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_random_model_falls_back(load_runner: LoadRunner) -> None:
    """Its heads agree by chance alone, so every layer reads all keys, and each head chooses for itself."""
    asked = Asked(load_runner("llama_mha"), prefix=200, question=8)
    prefix = ImportantPrefix(asked.stored(), QUARTER, 3)

    asked.sparse(200, 208, prefix)

    token = 16 * 4
    assert [found.accepted for found in prefix.identifications.values()] == [False] * 3
    assert prefix.bytes_read.by_kind() == {
        "probe_keys": 3 * 3 * 200 * token,
        "chosen": 0,
        "fallback_keys": 3 * 4 * 200 * token,
        "fallback_values": 3 * 4 * 50 * token,
    }


def test_heads_that_look_alike_share_a_set(load_runner: LoadRunner) -> None:
    """Probe heads of equal weights agree in every layer: keys of three heads and a quarter of all KV are read."""
    asked = Asked(load_runner("agreeing"), prefix=200, question=8)
    prefix = ImportantPrefix(asked.stored(), QUARTER, 3)

    asked.sparse(200, 208, prefix)

    token = 16 * 4
    assert [found.accepted for found in prefix.identifications.values()] == [True] * 3
    assert prefix.bytes_read.by_kind()["probe_keys"] == 3 * 3 * 200 * token
    assert prefix.bytes_read.by_kind()["chosen"] == 3 * 2 * 4 * 50 * token
    assert prefix.bytes_read.total == 3 * token * (3 * 200 + 2 * 4 * 50)


def test_what_is_not_chosen_is_not_looked_at(load_runner: LoadRunner) -> None:
    """Any KV at all may stand there, but for the probe heads' keys."""
    asked = Asked(load_runner("agreeing"), prefix=120, question=9)
    prefix = ImportantPrefix(asked.stored(), QUARTER, 3)
    expected = asked.sparse(120, 129, prefix)
    slots = torch.from_numpy(token_slots(asked.pages, 16, 0, 120))
    kv = asked.runner.pool.tensor.flatten(2, 3)
    for layer, found in prefix.identifications.items():
        ignored = torch.ones(120, dtype=torch.bool)
        ignored[found.tokens] = False
        kv[layer, 1, slots[ignored]] = float("nan")
        kv[layer, 0, slots[ignored], 3] = float("nan")

    assert torch.equal(asked.sparse(120, 129, ImportantPrefix(asked.stored(), QUARTER, 3)), expected)


def test_other_requests_of_the_batch_are_exact(load_runner: LoadRunner) -> None:
    """A step may mix them: prefill and decode of others have the logits that they have alone."""
    runner = load_runner("llama")
    asked = Asked(runner, prefix=64, question=7, seed=1)
    alone = asked.sparse(64, 71, ImportantPrefix(asked.stored(), QUARTER, 3))
    free = sorted(set(range(runner.pool.pages)) - set(asked.pages.tolist()))
    tables = [torch.tensor(free[:4]).numpy().astype("int32"), torch.tensor(free[4:8]).numpy().astype("int32")]
    prompts = [random_prompt(40, seed=5), random_prompt(33, seed=6)]
    expected = [
        run_step(runner, [(Request(prompt, table), len(prompt))]) for prompt, table in zip(prompts, tables, strict=True)
    ]

    segments = [Segment(40, 0, tables[0]), Segment(7, 64, asked.pages), Segment(1, 32, tables[1])]
    meta = ForwardMeta.build(segments, 16, "cpu")
    prefixes = {1: ImportantPrefix(asked.stored(), QUARTER, 3)}
    ids = torch.tensor([*prompts[0], *asked.tokens[64:71], prompts[1][32]])
    positions = torch.cat([torch.arange(40), torch.arange(64, 71), torch.tensor([32])])
    step = ImportanceStep(meta, runner.pool, CpuAttention(runner.pool), prefixes)
    logits = runner.run(ids, positions, step, torch.tensor([39, *range(40, 47), 47]))

    torch.testing.assert_close(logits[:1], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1:8], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[8:], expected[1], atol=1e-4, rtol=1e-4)


def test_rows_within_the_prefix_are_refused(load_runner: LoadRunner) -> None:
    """The request's own tokens begin where the prefix ends."""
    asked = Asked(load_runner("llama"), prefix=64, question=7)
    prefix = ImportantPrefix(asked.stored(), QUARTER, 3)

    with pytest.raises(InvariantViolated, match="within a prefix"):
        asked.sparse(60, 71, prefix)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_layers_with_sinks_or_chunks_are_refused(family: str, load_runner: LoadRunner) -> None:
    """For the request's sake alone: it is computed instead."""
    asked = Asked(load_runner(family), prefix=64, question=7)

    with pytest.raises(SelectionFailed) as failed:
        asked.sparse(64, 71, ImportantPrefix(asked.stored(), QUARTER, 3))

    assert "knows neither sinks nor chunks" in str(failed.value.__cause__)
