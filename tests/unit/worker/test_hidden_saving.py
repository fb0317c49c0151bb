"""The executor saves the hidden states of leased requests: exactly, in whole chunks, with one answer for each lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.worker.detokenizer import Vocabulary
from services.worker.engine.model_runner import ModelRunner
from services.worker.hidden_saving import RING_TOKENS
from services.worker.kv.loads import LoadResult
from services.worker.restore.projection import KvProjection
from shared.chunks import chunk_pages
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.requests import SamplingParams
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import DetachHostPool, HiddenLease
from tests.engine_driver import random_prompt
from tests.unit.worker.driven_executor import (
    Driven,
    abort,
    admit,
    batch,
    chunk,
    extend,
    load,
    preempt,
)
from tests.unit.worker.fake_model import GEOMETRY, POISON, FakeRunner
from tests.unit.worker.importance.conftest import checkpoint_of, load_runner
from tests.unit.worker.restore.hidden_pages import hidden_geometry
from tests.unit.worker.restore.saved_hidden import Witness, assert_saved, hidden_lease

__all__ = ["checkpoint_of", "load_runner"]

FAKE_HIDDEN = hidden_geometry(GEOMETRY, 1, 0, 0)
"""The fake model has no attention modules, so of it only KV can be saved: of all layers but the first."""


class Served:
    """An executor on a real model, with a hidden pool of 64 chunks."""

    def __init__(self, runner: ModelRunner, words: Vocabulary, form: tuple[int, int], **settings: object) -> None:
        self.runner = runner
        projection = KvProjection(runner)
        self.driven = Driven(runner, words, projection=projection, **settings)  # type: ignore[arg-type]
        self.witness = Witness(runner)
        self.geometry = hidden_geometry(runner.geometry, *form, projection.shape.hidden)
        self.per_chunk = chunk_pages(runner.geometry.page_size)
        self.host = self.driven.host_pool(16 * self.per_chunk, geometry=self.geometry)
        self._orders = np.random.default_rng(1)
        self.hidden_pages: list[int] = self._orders.permutation(16 * self.per_chunk).tolist()
        self.device_pages: list[int] = self._orders.permutation(runner.pool.pages).tolist()

    def lease(
        self, tokens: list[int], chunks: int, *, depth: int = 0, lease_id: int = 1
    ) -> tuple[HiddenLease, list[int]]:
        """A lease of pages that nobody has had yet, and these pages."""
        pages = self.take_hidden_pages(chunks)
        size = self.runner.geometry.page_size
        return hidden_lease(tokens, pages, size, depth=depth, lease_id=lease_id), pages

    def take_hidden_pages(self, chunks: int) -> list[int]:
        count = chunks * self.per_chunk
        taken, self.hidden_pages = self.hidden_pages[:count], self.hidden_pages[count:]
        return taken

    def table(self, tokens: int) -> list[int]:
        """Device pages for so many tokens."""
        count = -(-tokens // self.runner.geometry.page_size)
        taken, self.device_pages = self.device_pages[:count], self.device_pages[count:]
        return taken


Serve = Callable[..., Served]


@pytest.fixture
def serve(load_runner: Callable[..., ModelRunner], checkpoint_of: Callable[[str], Path]) -> Iterator[Serve]:
    """Serve a family; its executor is closed at the end of the test."""
    made: list[Served] = []

    def start(
        family: str = "llama_mha", form: tuple[int, int] = (1, 1), *, page_size: int = 16, **settings: object
    ) -> Served:
        runner = load_runner(family, page_size=page_size)
        made.append(Served(runner, Vocabulary.from_directory(checkpoint_of(family)), form, **settings))
        return made[-1]

    yield start
    for served in made:
        served.driven.close()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, min_tokens=count, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "form", "page_size", "thread"),
    [
        ("llama_mha", (1, 1), 1, "at once"),
        ("llama_mha", (1, 1), 16, "its own"),
        ("llama_mha", (0, 2), 32, "at once"),
        ("llama_mha", (0, 3), 64, "its own"),
        ("llama", (0, 3), 16, "at once"),
        ("llama", (1, 0), 16, "its own"),
        ("llama", (2, 1), 32, "at once"),
        ("qwen3", (1, 1), 16, "at once"),
        ("opt", (0, 2), 16, "at once"),
        ("gemma2", (0, 4), 16, "at once"),
    ],
)
def test_pages_hold_what_was_computed(
    serve: Serve, family: str, form: tuple[int, int], page_size: int, thread: str
) -> None:
    """In chunks and in decode steps beside a request that is not saved, from a depth on: hidden states, K and V."""
    settings = {"hidden_submit": None} if thread == "its own" else {}
    served = serve(family, form, page_size=page_size, **settings)
    made, prompt, other = served.driven, random_prompt(150, seed=1), random_prompt(90, seed=2)
    table, lease, pages = served.table(210), *served.lease(prompt, 3, depth=64)
    made.give(
        admit(other, served.table(160), request_id="other", params=greedy(65)),
        admit(prompt, table, params=greedy(60), hidden_lease=lease),
        batch(chunk(0, 40, request_id="other"), chunk(0, 70)),
        batch(chunk(40, 90, request_id="other"), chunk(70, 150)),
    )

    made.run()
    made.saving.end_all()
    made.executor._post()

    (saved,) = made.hidden_saved()
    assert saved.chunks == 2
    tokens = prompt + made.tokens()
    assert_saved(served.host, saved, lease, pages, tokens, table, served.runner, served.witness)
    counters = made.executor.counters
    assert (counters.hidden_chunks_saved, counters.hidden_rows_taken) == (2, 209 - 64)
    assert (counters.hidden_ring_full, counters.hidden_lease_full) == (0, 0)


def test_a_lease_shorter_than_its_sequence(serve: Serve) -> None:
    """Whole chunks are saved as far as the pages reach; that there were too few is counted."""
    served = serve()
    made, prompt, table = served.driven, random_prompt(200, seed=3), served.table(210)
    lease, pages = served.lease(prompt, 1)
    made.give(admit(prompt, table, params=greedy(2), hidden_lease=lease), batch(chunk(0, 200)))

    made.run()

    (saved,) = made.hidden_saved()
    assert saved.chunks == 1
    assert_saved(served.host, saved, lease, pages, prompt, table, served.runner, served.witness)
    assert made.executor.counters.hidden_lease_full == 1


def test_more_pages_come_with_more_room(serve: Serve) -> None:
    """What was computed beyond the lease's pages waits for those that the next grant brings."""
    served = serve()
    made, prompt = served.driven, random_prompt(100, seed=4)
    table = served.table(250)
    lease, pages = served.lease(prompt, 1)
    made.give(admit(prompt, table[:7], params=greedy(100), hidden_lease=lease), batch(chunk(0, 100)))
    made.run()
    assert made.lease_requests()
    more = served.take_hidden_pages(2)

    made.give(extend(table[7:], hidden_pages=more))
    made.run()

    (saved,) = made.hidden_saved()
    assert saved.chunks == 3
    tokens = prompt + made.tokens()
    assert_saved(served.host, saved, lease, pages + more, tokens, table, served.runner, served.witness)


@pytest.mark.parametrize("end", ["preempt", "abort", "replace"])
def test_an_end_in_the_middle(serve: Serve, end: str) -> None:
    """However the request ends, what is whole by then is saved, and the lease is answered once."""
    served = serve()
    made, prompt, table = served.driven, random_prompt(200, seed=5), served.table(220)
    lease, pages = served.lease(prompt, 3)
    made.give(admit(prompt, table, params=greedy(5), hidden_lease=lease), batch(chunk(0, 140)))
    made.run()
    assert made.hidden_saved() == []
    again, more = served.lease(prompt, 2, depth=64, lease_id=2)
    other = served.table(220)

    if end == "replace":
        made.give(admit(prompt, other, attempt=2, params=greedy(5), hidden_lease=again))
        made.give(batch(chunk(0, 200, attempt=2)))
    else:
        made.give(preempt() if end == "preempt" else abort())
    made.run()

    first, *later = made.hidden_saved()
    assert first.chunks == 2
    assert_saved(served.host, first, lease, pages, prompt, table, served.runner, served.witness)
    if end == "replace":
        (second,) = later
        assert second.chunks == 2
        assert_saved(served.host, second, again, more, prompt, other, served.runner, served.witness)
    else:
        assert later == []


def test_a_prompt_that_is_scored_in_pieces(serve: Serve) -> None:
    """Several forward passes of one step continue one another."""
    served = serve()
    made, prompt, table = served.driven, random_prompt(150, seed=6), served.table(160)
    made.executor._passes._computer._slice_rows = 20
    lease, pages = served.lease(prompt, 2)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    made.give(admit(prompt, table, params=params, hidden_lease=lease), batch(chunk(0, 130)), batch(chunk(130, 150)))

    made.run()

    (saved,) = made.hidden_saved()
    assert saved.chunks == 2
    assert_saved(served.host, saved, lease, pages, prompt, table, served.runner, served.witness)


def test_a_ring_without_room_ends_the_saving(serve: Serve) -> None:
    """The step goes on; what there was room for is saved, and the lease is answered while the request runs."""
    served = serve("llama_mha", (0, 3), hidden_ring_bytes=100 * 3 * 256)
    made, prompt, table = served.driven, random_prompt(150, seed=7), served.table(160)
    lease, pages = served.lease(prompt, 2)
    made.give(admit(prompt, table, params=greedy(5), hidden_lease=lease), batch(chunk(0, 140)))

    made.run()

    (saved,) = made.hidden_saved()
    assert saved.chunks == 1
    assert made.finished() == []
    assert made.executor.counters.hidden_ring_full == 1
    assert_saved(served.host, saved, lease, pages, prompt, table, served.runner, served.witness)
    made.give(batch(chunk(140, 150)))
    made.run()
    assert len(made.finished()) == len(made.hidden_saved()) == 1


def test_a_ring_holds_two_batches_by_default(serve: Serve) -> None:
    """However wide the model is."""
    served = serve("llama_mha", (0, 2), hidden_ring_bytes=0)

    served.driven.run()

    assert served.driven.saving._saver is not None
    assert served.driven.saving._saver.ring.room_rows == RING_TOKENS


class _LateLoss:
    """A transfer that finds out when it ends that these device pages were never right."""

    gate = SimpleNamespace(wait=lambda layer: None, rejected=None)

    def __init__(self, request_id: str, pages: list[int]) -> None:
        self._request_id, self._pages = request_id, pages

    def finish(self) -> LoadResult:
        failure = LoadFailure(storage_id="kv", host_pages=pack_int32([0]), reason="torn")
        return LoadResult(failures=[failure], failed_requests=[self._request_id], lost_pages=frozenset(self._pages))


def test_a_failed_load_voids_what_its_step_has_taken(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the pass itself went well; the repeated step saves those who stand on none of it."""
    served = serve()
    made, prompt, good = served.driven, random_prompt(150, seed=8), random_prompt(130, seed=9)
    table, good_table = served.table(160), served.table(140)
    lease, pages = served.lease(prompt, 1, depth=64)
    good_lease, good_pages = served.lease(good, 2, lease_id=2)
    loaded = table[:4]
    made.give(
        admit(good, good_table, request_id="good", params=greedy(5), hidden_lease=good_lease),
        admit(prompt, table, cached=64, params=greedy(5), hidden_lease=lease),
    )
    monkeypatch.setattr(made.loads, "start", lambda loads: _LateLoss("r", loaded))
    made.give(
        batch(
            chunk(64, 150),
            chunk(0, 130, request_id="good"),
            loads=[load([], [0, 1, 2, 3], [0, 1, 2, 3], loaded, storage_id="kv")],
        )
    )
    made.run()

    (done,) = made.done()
    assert set(done.failed) == {"r"}
    made.give(batch(chunk(0, 150)))
    made.run()

    saved = {each.lease_id: each for each in made.hidden_saved()}
    assert (len(made.hidden_saved()), saved[1].chunks, saved[2].chunks) == (2, 1, 2)
    assert_saved(served.host, saved[1], lease, pages, prompt, table, served.runner, served.witness)
    assert_saved(served.host, saved[2], good_lease, good_pages, good, good_table, served.runner, served.witness)
    assert made.saving.counts.failed_steps == 1


def test_a_chunk_that_raises_takes_nothing_with_it(driven: Driven) -> None:
    """Whoever is computed alone in the repetition is saved; of the one at fault nothing is."""
    driven.runner.is_poisonable = True
    host = driven.host_pool(64, geometry=FAKE_HIDDEN)
    good, bad = [20 + number % 19 for number in range(70)], [POISON] * 70
    leases = [hidden_lease(tokens, range(16 * n, 16 * n + 16), 4, lease_id=n) for n, tokens in ((1, good), (2, bad))]
    driven.give(
        admit(good, range(20), max_tokens=2, hidden_lease=leases[0]),
        admit(bad, range(20, 40), request_id="bad", max_tokens=2, hidden_lease=leases[1]),
        batch(chunk(0, 70), chunk(0, 70, request_id="bad")),
    )
    driven.run()
    driven.give(abort("bad"))
    driven.run()

    saved = {each.lease_id: each for each in driven.hidden_saved()}
    assert (len(driven.hidden_saved()), saved[1].chunks, saved[2].chunks) == (2, 1, 0)
    assert_saved(host, saved[1], leases[0], range(16, 32), good, range(20), driven.runner)


def test_a_pool_that_goes_ends_its_leases(driven: Driven) -> None:
    """They are answered with what was saved; a later lease of that storage saves nothing."""
    host = driven.host_pool(32, geometry=FAKE_HIDDEN)
    tokens = [20] * 70
    lease = hidden_lease(tokens, range(16), 4)
    driven.give(admit(tokens, range(20), hidden_lease=lease), batch(chunk(0, 66)))
    driven.run()

    driven.give(DetachHostPool(storage_id="s"), batch(chunk(66, 70)))
    late = hidden_lease(tokens, range(16), 4, lease_id=2)
    driven.give(admit(tokens, range(20, 40), request_id="late", hidden_lease=late))
    driven.run()

    first, second = driven.hidden_saved()
    assert_saved(host, first, lease, range(16), tokens, range(20), driven.runner)
    assert (first.chunks, second.lease_id, second.chunks) == (1, 2, 0)
    assert len(driven.finished()) == 1


@pytest.mark.parametrize(
    ("geometry", "changes"),
    [
        (FAKE_HIDDEN, {"storage_id": "elsewhere"}),
        (FAKE_HIDDEN, {"depth": 32}),
        (FAKE_HIDDEN, {"parent": b"short"}),
        (FAKE_HIDDEN, {"pages": pack_int32([*range(15), 99])}),
        (FAKE_HIDDEN, {"pages": pack_int32([*range(15), -1])}),
        (hidden_geometry(GEOMETRY, 1, 2, 2), {}),  # Hidden states of a model that shows none.
        (KvGeometry(layers=2, kv_heads=1, head_dim=2, page_size=4, dtype="float32", absent=1), {}),
    ],
)
def test_a_lease_that_cannot_be_kept_is_answered_at_once(
    driven: Driven, geometry: KvGeometry, changes: dict[str, object]
) -> None:
    """With no chunk; the request is served all the same."""
    driven.host_pool(16, geometry=geometry)
    tokens = [20] * 70
    given = {"lease_id": 1, "storage_id": "s", "depth": 0, "pages": pack_int32(range(16)), "parent": bytes(16)}
    lease = HiddenLease(**{**given, **changes})  # type: ignore[arg-type]
    driven.give(admit(tokens, range(20), max_tokens=2, hidden_lease=lease), batch(chunk(0, 70)))

    driven.run()

    (saved,) = driven.hidden_saved()
    assert (saved.lease_id, saved.chunks, saved.tokens) == (1, 0, b"")
    assert len(driven.finished()) == 1


def test_an_admission_that_comes_to_naught_answers_its_lease(driven: Driven) -> None:
    """Refused, or older than what runs."""
    driven.host_pool(16, geometry=FAKE_HIDDEN)
    leases = [hidden_lease([20] * 70, range(16), 4, lease_id=number) for number in (1, 2)]
    driven.give(
        admit([20] * 70, range(3), request_id="refused", hidden_lease=leases[0]),
        admit([20] * 70, range(20), attempt=2),
        admit([20] * 70, range(20), attempt=1, hidden_lease=leases[1]),
    )

    driven.run()

    assert [(each.lease_id, each.chunks) for each in driven.hidden_saved()] == [(1, 0), (2, 0)]


def test_a_worker_that_stops_answers_its_leases() -> None:
    """With what was saved so far, after the saving thread is done with it."""
    made = Driven(FakeRunner(), hidden_submit=None)
    try:
        made.host_pool(32, geometry=FAKE_HIDDEN)
        tokens = [20] * 70
        lease = hidden_lease(tokens, range(16), 4)
        made.give(admit(tokens, range(20), hidden_lease=lease), batch(chunk(0, 66)))
        made.run()
        assert made.hidden_saved() == []

        made.executor.inbox.close()
        made.executor.run()

        (saved,) = made.hidden_saved()
        assert saved.chunks == 1
    finally:
        made.close()


def test_a_step_without_leases_has_no_hooks(serve: Serve) -> None:
    """Nothing is attached to the model, and no rows are taken."""
    served = serve()
    hooks: list[int] = []
    forward, modules = served.runner.forward, KvProjection(served.runner).inputs.modules

    def seen(*arguments: object) -> object:
        hooks.append(sum(len(module._forward_pre_hooks) for module in modules))
        return forward(*arguments)  # type: ignore[arg-type]

    served.runner.forward = seen  # type: ignore[assignment]
    prompt = random_prompt(70, seed=10)
    lease, _ = served.lease(prompt, 1)
    served.driven.give(admit(prompt, served.table(80), params=greedy(1), hidden_lease=lease), batch(chunk(0, 70)))
    served.driven.run()
    served.driven.give(admit(prompt, served.table(80), request_id="plain", params=greedy(1)))
    served.driven.give(batch(chunk(0, 70, request_id="plain")))
    served.driven.run()

    assert hooks == [1, 0]
    assert served.driven.executor.counters.hidden_rows_taken == 70
