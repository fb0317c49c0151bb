"""The executor restores prompts from hidden pages: KV and answers are those of computation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.worker.kv.layer_gate import LayerGate
from shared.hidden_forms import hidden_geometries
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams
from tests.engine_driver import random_prompt
from tests.unit.worker.driven_executor import admit, batch, chunk
from tests.unit.worker.restore.restoring_cell import SUFFIX, TOKENS, Loaded, MakeCell, flip
from tests.unit.worker.restore.saved import FAMILIES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_prompt_is_a_computed_one(family: str, dtype: str, make_cell: MakeCell) -> None:
    """In every family, in two batches: the KV equals the computed one to the bit, and the answer is the same."""
    cell = make_cell(family, dtype=dtype)

    cell.driven.give(cell.admission(cell.table))
    cell.driven.give(batch(restores=[cell.restore(0, 64)]), batch(restores=[cell.restore(64, 128)]))
    cell.driven.run()

    assert torch.equal(cell.found(), cell.expected())
    assert [(done.failed, done.restored_tokens) for done in cell.driven.done()[-2:]] == [((), 64), ((), 64)]
    assert cell.go_on() == cell.answer


KV = KvGeometry(layers=3, kv_heads=4, head_dim=16, page_size=16, dtype="float32")


@pytest.mark.parametrize(
    ("form", "recomputed"),
    [
        ((form.absent, form.from_hidden), recomputed)
        for form in hidden_geometries(KV, 64)
        for recomputed in range(form.absent, 4)
    ],
)
def test_every_form_and_mix(form: tuple[int, int], recomputed: int, make_cell: MakeCell) -> None:
    """Whatever the pages hold of each layer, and however many layers are recomputed all the same."""
    cell = make_cell(form=form)

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS, recomputed=recomputed)]))
    cell.driven.run()

    # The chunk is the one that was computed, so recomputed layers are equal to the bit too.
    assert torch.equal(cell.found(), cell.expected())
    assert cell.go_on() == cell.answer


@pytest.mark.parametrize("page_size", [1, 32, 64])
def test_page_sizes(page_size: int, make_cell: MakeCell) -> None:
    """Pages of any size, on shuffled device pages."""
    cell = make_cell(form=(1, 1), page_size=page_size)

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    assert torch.equal(cell.found(), cell.expected())


@pytest.mark.parametrize("pages", [1, 2, 3, 7])
def test_a_run_that_cannot_be_staged_goes_in_parts(pages: int, make_cell: MakeCell) -> None:
    """Staging memory for so many pages of one layer is enough for eight, recomputation in front or not."""
    cell = make_cell(form=(1, 1), staging_bytes=pages * 16 * 64 * 4 + 100, chunks=[TOKENS, SUFFIX])

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    torch.testing.assert_close(cell.found(), cell.expected(), atol=1e-5, rtol=1e-4)
    assert torch.equal(cell.found()[1:], cell.expected()[1:])
    assert cell.driven.done()[-1].restored_tokens == TOKENS


def test_usage_and_figures(make_cell: MakeCell) -> None:
    """Restored tokens are told apart from computed ones, in usage, in the batch's figures and in the counters."""
    cell = make_cell()

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.go_on()

    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.hidden_tokens, usage.computed_tokens, usage.host_tokens) == (TOKENS, SUFFIX, 0)
    restored, computed = cell.driven.done()[-2:]
    assert (restored.restored_tokens, restored.computed_tokens, restored.restores_refused) == (TOKENS, 0, ())
    assert (computed.restored_tokens, computed.computed_tokens, computed.restore_us) == (0, SUFFIX, 0)
    assert restored.restore_us > 0
    counters = cell.driven.executor.counters
    assert (counters.tokens_restored, counters.restores_refused) == (TOKENS, 0)


@pytest.mark.parametrize("fill_bubble", [False, True])
@pytest.mark.parametrize("recomputed", [0, 2, 3])
def test_loads_below_a_restoration(recomputed: int, fill_bubble: bool, make_cell: MakeCell) -> None:
    """Admitted with loads and the first restoration in one batch: recomputed layers see the KV that is loaded."""
    cell = make_cell(chunks=[32, 96, SUFFIX])
    loaded = Loaded(cell)

    cell.driven.give(
        cell.admission(cell.table, cached=32, host_tokens=32),
        batch(
            loads=[loaded.order], restores=[cell.restore(32, TOKENS, recomputed=recomputed)], fill_bubble=fill_bubble
        ),
    )
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ()
    assert torch.equal(cell.found(), cell.expected())
    assert cell.go_on() == cell.answer
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.host_tokens, usage.hidden_tokens) == (32, 96)


@pytest.mark.parametrize("is_good", [True, False])
def test_recomputation_waits_for_loads(is_good: bool, make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that take place only when somebody waits for them are there in time, or void the restoration."""
    later: list[Callable[[], None]] = []
    cell = make_cell(chunks=[32, 96, SUFFIX], submit=later.append)
    loaded = Loaded(cell)
    loaded.pool.pages[0, 1, 3] ^= not is_good
    wait, waited = LayerGate.wait, []

    def wait_and_load(gate: LayerGate, layer: int) -> None:
        waited.append((layer, cell.found(tokens=32)[layer].isnan().any().item()))
        while later:
            later.pop()()
        wait(gate, layer)

    monkeypatch.setattr(LayerGate, "wait", wait_and_load)
    cell.driven.give(
        cell.admission(cell.table, cached=32, host_tokens=32),
        batch(loads=[loaded.order], restores=[cell.restore(32, TOKENS, recomputed=2)]),
    )
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert waited[0] == (0, True)
    assert torch.equal(cell.found(), cell.expected()) == is_good
    assert (done.failed, done.restores_refused) == (() if is_good else ("r",), ())


def test_others_decode_meanwhile(make_cell: MakeCell) -> None:
    """A request that is decoding goes on in the step of the same batch, whether the restoration is good or not."""
    cell = make_cell()
    tokens = random_prompt(20, seed=9)
    params = SamplingParams(max_tokens=30, min_tokens=30, temperature=0)
    cell.driven.give(
        admit(tokens, cell.other.tolist(), request_id="d", params=params), batch(chunk(0, 20, request_id="d"))
    )
    cell.driven.run(most=1)
    before = len(cell.driven.tokens("d"))
    flip(cell)

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, 64)]))
    cell.driven.give(batch(restores=[cell.restore(64, TOKENS)]))
    cell.driven.run(most=2)

    assert len(cell.driven.tokens("d")) == before + 2
    assert [done.failed for done in cell.driven.done()[-2:]] == [(), ("r",)]
