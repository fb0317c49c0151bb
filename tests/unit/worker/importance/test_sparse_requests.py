"""Requests with a sparse prefix through the executor: right tokens, and nothing of others touched."""

from __future__ import annotations

import pytest
import torch

from services.worker.sparse_prefixes import ImportanceSettings
from shared.messages.base import unpack_int32
from shared.messages.tokens import ImportanceUsage
from shared.metrics import REGISTRY
from tests.unit.worker.driven_executor import admit, batch, chunk, preempt
from tests.unit.worker.importance.sparse_cell import ANSWER, GREEDY, MakeCell


@pytest.mark.parametrize(
    ("family", "page_size", "start"),
    [
        ("llama", 16, 0), ("llama", 1, 64), ("llama_mha", 64, 64), ("mistral", 16, 64), ("gemma2", 1, 0),
        ("gemma2", 16, 64), ("opt", 64, 0),
    ],
)  # fmt: skip
def test_all_of_a_prefix_gives_the_exact_answer(family: str, page_size: int, start: int, make_cell: MakeCell) -> None:
    """Two sparse requests and an exact one in each batch, questions in chunks, then decode: the tokens are those of
    exact requests, though the document's own pages are poisoned.
    """
    cell = make_cell(family, page_size)
    prompts = {name: cell.prompt(question, seed) for seed, (name, question) in enumerate([("a", 30), ("b", 9)], 1)}
    for name, prompt in prompts.items():
        cell.driven.give(
            cell.exact(prompt, f"exact-{name}"), batch(chunk(192, len(prompt), request_id=f"exact-{name}"))
        )
    cell.driven.run()
    other = cell.prompt(40, seed=5)[192:]
    cell.driven.give(admit(other, cell.take(60), request_id="alone", params=GREEDY))
    cell.driven.give(batch(chunk(0, 40, request_id="alone")))
    cell.driven.run()
    cell.forget(start)

    cell.driven.give(*(cell.sparse(prompt, name, start=start) for name, prompt in prompts.items()))
    cell.driven.give(admit(other, cell.take(60), request_id="beside", params=GREEDY))
    cell.driven.give(
        batch(chunk(192, 200, request_id="a"), chunk(0, 20, request_id="beside")),
        batch(chunk(200, 222, request_id="a"), chunk(20, 40, request_id="beside"), chunk(192, 201, request_id="b")),
    )
    cell.driven.run()

    assert [done.failed for done in cell.driven.done()] == [()] * 6
    for name in prompts:
        assert cell.driven.tokens(name) == cell.driven.tokens(f"exact-{name}")
    assert cell.driven.tokens("beside") == cell.driven.tokens("alone")
    assert len(cell.driven.tokens("a")) == ANSWER


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_neighbours_of_a_sparse_request_have_the_same_bits(family: str, make_cell: MakeCell) -> None:
    """In batches of the same rows, an exact request's KV does not depend on whether another one is lossy."""
    cell = make_cell(family)
    prompt, question = cell.prompt(23, seed=1), cell.prompt(12, seed=2)
    written = []
    for name, order in (
        ("exact", cell.exact(question, "exact")),
        ("sparse", cell.sparse(question, "sparse", ratio=0.1)),
    ):
        beside = cell.exact(prompt, f"beside-{name}")
        cell.driven.give(order, beside)
        cell.driven.give(batch(chunk(192, 215, request_id=f"beside-{name}"), chunk(192, 204, request_id=name)))
        cell.driven.run()
        written.append(cell.runner.pool.tensor[:, :, unpack_int32(beside.pages)].clone())

    assert torch.equal(*written)
    assert cell.driven.tokens("beside-exact") == cell.driven.tokens("beside-sparse")


@pytest.mark.parametrize(("family", "alpha"), [("llama_mha", 0.6), ("agreeing", 0.6), ("agreeing", 0.0)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_nothing_but_the_requests_own_pages_is_written(
    family: str, alpha: float, page_size: int, make_cell: MakeCell
) -> None:
    """Lossy KV lies in leased pages alone, whether heads share what is chosen or each have their own."""
    cell = make_cell(family, page_size, ImportanceSettings(alpha=alpha))
    before = cell.runner.pool.tensor.clone()
    prompt = cell.prompt(20, seed=3)
    order = cell.sparse(prompt, "r", ratio=0.3)

    cell.driven.give(order, batch(chunk(192, 205)), batch(chunk(205, 212)))
    cell.driven.run()

    assert order.sparse is not None
    changed = (cell.runner.pool.tensor != before).flatten(3).any(dim=3).any(dim=(0, 1)).nonzero()[:, 0].tolist()
    own = unpack_int32(order.pages)[192 // page_size :]
    assert set(changed) <= {*own, *unpack_int32(order.sparse.pages)}
    assert len(cell.driven.tokens()) == ANSWER


def test_usage_and_batch_say_what_was_loaded(make_cell: MakeCell) -> None:
    """With the step in which all layers had chosen; a chunk's share is of its tokens that lie in the prefix."""
    cell = make_cell("agreeing")
    prompt = cell.prompt(20, seed=3)

    cell.driven.give(cell.sparse(prompt, "r", start=96, ratio=0.25), batch(chunk(192, 205)), batch(chunk(205, 212)))
    cell.driven.run()

    _, first, second = cell.driven.done()
    (loaded,) = first.sparse_loaded
    (source,) = cell.sources
    assert (loaded.request_id, loaded.attempt) == ("r", 1)
    assert len(loaded.shares) == 2  # Chunks begin at 64 and 128.
    assert sum(share * tokens / 255 for share, tokens in zip(loaded.shares, (32, 64), strict=True)) == pytest.approx(
        24, abs=0.5
    )
    assert loaded.disk_bytes == source.disk_bytes > 0
    assert second.sparse_loaded == ()
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.sparse_tokens, usage.computed_tokens) == (96, 20)
    assert usage.importance == ImportanceUsage(
        ratio=0.25, metric="h2o", loaded_tokens=24, layers=3, layers_fallen_back=0, disk_bytes=source.disk_bytes
    )
    counters = cell.driven.executor.counters
    assert (counters.sparse_prefixes_loaded, counters.sparse_prefixes_refused) == (1, 0)
    assert counters.sparse_disk_bytes == source.disk_bytes


def test_metrics_count_what_was_read(make_cell: MakeCell) -> None:
    """Bytes by what for, those that were attended over, and layers that fell back."""
    cell = make_cell("agreeing")
    names = ("probe_keys", "chosen")
    before = {name: sampled("worker_sparse_bytes", kind=name) for name in names}
    needed = sampled("worker_sparse_needed_bytes")
    layers, fallen = sampled("worker_sparse_layers"), sampled("worker_sparse_layers_fallen_back")

    cell.driven.give(cell.sparse(cell.prompt(9, seed=3), "r", ratio=0.25), batch(chunk(192, 201)))
    cell.driven.run()

    vector = 16 * 4
    read = {name: sampled("worker_sparse_bytes", kind=name) - before[name] for name in names}
    assert read["probe_keys"] == 3 * 3 * 128 * vector
    assert read["chosen"] == sampled("worker_sparse_needed_bytes") - needed == 3 * 32 * 2 * 4 * vector
    assert sampled("worker_sparse_layers") - layers == 3
    assert sampled("worker_sparse_layers_fallen_back") == fallen
    assert cell.driven.executor.counters.sparse_layers_fallen_back == 0


def sampled(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"thermocline_{name}_total", labels) or 0.0


def test_reading_is_no_part_of_the_compute_time(make_cell: MakeCell) -> None:
    """Each read takes a second by the clock of the worker, everything else together far less."""
    cell = make_cell("llama_mha")

    def take_a_second() -> None:
        cell.driven._now += 10**9

    cell.prepare = lambda source: setattr(source, "on_read", take_a_second)  # type: ignore[method-assign]
    cell.driven.give(cell.sparse(cell.prompt(4, seed=3), "r", ratio=0.25), batch(chunk(192, 196)))
    cell.driven.run()

    done = cell.driven.done()[-1]
    (loaded,) = done.sparse_loaded
    seconds = cell.sources[0].reads
    assert seconds * 10**6 <= loaded.read_us < (seconds + 1) * 10**6
    assert 0 < done.compute_us < 10**6
    assert (done.stall_us, cell.driven.executor._pace.row_ns < 10**8) == (0, True)


def test_a_preempted_request_chooses_anew(make_cell: MakeCell) -> None:
    """Its next attempt goes on with its tokens; with all of the prefix, the answer is the exact one."""
    cell = make_cell("llama")
    prompt = cell.prompt(20, seed=3)
    cell.driven.give(cell.exact(prompt, "exact"), batch(chunk(192, 212, request_id="exact")))
    cell.driven.run()
    cell.driven.give(cell.sparse(prompt, "r"), batch(chunk(192, 212)))
    cell.driven.run(most=5)
    cell.driven.give(preempt())
    cell.driven.run()
    (ended,) = cell.driven.preempted()
    output = unpack_int32(ended.output)
    assert 0 < len(output) < ANSWER

    again = cell.sparse(prompt + output, "r", attempt=2, prompt_tokens=212)
    cell.driven.give(again, batch(chunk(192, 212 + len(output), attempt=2)))
    cell.driven.run()

    assert unpack_int32(cell.driven.finished()[-1].output) == cell.driven.tokens("exact")
    assert len(cell.sources) == 2
