"""Hidden states that cannot be used are refused, a restoration on nothing is void; the worker and everybody else go
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.restore.hidden_page_source import HiddenOfPages
from shared.messages.worker_plans import DetachHostPool
from tests.engine_driver import page_tables
from tests.unit.worker.driven_executor import admit, batch, chunk
from tests.unit.worker.restore.restoring_cell import SUFFIX, TOKENS, Cell, Loaded, MakeCell, flip


def _give_away(cell: Cell) -> None:
    cell.pool.clear(cell.state[2])
    cell.pool.seal_page(cell.state[2], b"somebody else's.")


def _detach(cell: Cell) -> None:
    cell.driven.give(DetachHostPool(storage_id="s"))


@pytest.mark.parametrize("spoil", [flip, _give_away, _detach])
def test_hidden_states_that_cannot_be_used_are_refused(spoil: Callable[[Cell], None], make_cell: MakeCell) -> None:
    """The batch says so, and the request can be computed from where it was."""
    cell = make_cell()
    spoil(cell)

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert (done.failed, done.restores_refused, done.restored_tokens) == (("r",), ("r",), 0)
    assert cell.driven.executor.counters.restores_refused == 1
    cell.driven.give(batch(chunk(0, TOKENS)))
    assert cell.go_on() == cell.answer
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.hidden_tokens, usage.computed_tokens) == (0, TOKENS + SUFFIX)


def test_a_page_that_is_given_away_behind_its_back_is_refused(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say what was read of it, although each unit was verified."""
    cell = make_cell()
    read = HiddenOfPages.read

    def read_and_clear(source: HiddenOfPages, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        read(source, layer, start, end, into)
        if layer == 2:
            cell.pool.clear(cell.state[1])

    monkeypatch.setattr(HiddenOfPages, "read", read_and_clear)
    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    assert cell.driven.done()[-1].restores_refused == ("r",)


def test_a_worker_without_projection_restores_the_rest(make_cell: MakeCell) -> None:
    """Hidden states are refused; tokens and KV need no projection."""
    refusing = make_cell(has_projection=False)
    able = make_cell(form=(1, 0), has_projection=False)

    for cell in (refusing, able):
        cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
        cell.driven.run()

    assert refusing.driven.done()[-1].restores_refused == ("r",)
    assert able.driven.done()[-1].failed == ()
    assert torch.equal(able.found(), able.expected())


def test_staging_that_holds_no_page_is_a_refusal(make_cell: MakeCell) -> None:
    """Not an error that ends the worker."""
    cell = make_cell(staging_bytes=100)

    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    assert cell.driven.done()[-1].restores_refused == ("r",)


def test_a_model_that_raises_ends_nothing(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in the middle of a restoration refuses it; the worker and the same request go on."""
    cell = make_cell(form=(1, 2))
    runner = cell.runner
    run, raised = runner.run, []

    def broken(*args: object) -> torch.Tensor:
        raised.append(args)
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr(runner, "run", broken)
    cell.driven.give(cell.admission(cell.table), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()
    monkeypatch.setattr(runner, "run", run)

    assert len(raised) == 1
    assert cell.driven.done()[-1].restores_refused == ("r",)
    cell.driven.give(batch(chunk(0, TOKENS)))
    assert cell.go_on() == cell.answer


def test_one_fails_and_one_is_restored(make_cell: MakeCell) -> None:
    """In one batch, beside a chunk of a third request: only the request with the bad page fails."""
    cell = make_cell()
    twin = cell.driven.host_pool(8, storage_id="twin", geometry=cell.geometry)
    cell.computed.write(twin, range(8))
    flip(cell)
    table = page_tables(cell.runner, [200, 200, 200, 200], seed=1)[3]

    cell.driven.give(
        cell.admission(cell.table, request_id="bad"),
        cell.admission(cell.other, request_id="good"),
        cell.admission(table, request_id="computed"),
        batch(
            chunk(0, TOKENS, request_id="computed"),
            restores=[
                cell.restore(0, TOKENS, request_id="bad"),
                cell.computed.restore_chunk(0, TOKENS, range(8), request_id="good", storage_id="twin"),
            ],
        ),
    )
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert (done.failed, done.restores_refused) == (("bad",), ("bad",))
    assert (done.restored_tokens, done.computed_tokens) == (TOKENS, TOKENS)
    assert torch.equal(cell.found(cell.other), cell.expected())
    assert cell.go_on(request_id="good") == cell.answer
    assert cell.go_on(request_id="computed") == cell.answer


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 16, "end": 64},
        {"start": 0, "end": 64, "attempt": 2},
        {"start": 0, "end": 64, "request_id": "unknown"},
        {"start": 0, "end": 40},
        {"start": 0, "end": 64, "shorter": True},
        {"start": 0, "end": 0},
    ],
)
def test_a_plan_that_contradicts_itself_fails(wrong: dict[str, Any], make_cell: MakeCell) -> None:
    """Not at the end of what is there, of another attempt, of nobody, not of whole pages, with too few pages, empty."""
    cell = make_cell()
    start, end = wrong.pop("start"), wrong.pop("end")
    pages = cell.pages(start, end)[: -1 if wrong.pop("shorter", False) else None]
    ordered = cell.computed.restore_chunk(start, end, pages, **wrong)

    cell.driven.give(cell.admission(cell.table), batch(restores=[ordered]))
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert (done.failed, done.restores_refused, done.restored_tokens) == ((ordered.request_id,), (), 0)
    assert cell.found().isnan().all()


def test_the_last_token_is_never_restored(make_cell: MakeCell) -> None:
    """Its logits are wanted, so a run that includes it is rejected."""
    cell = make_cell()
    tokens = cell.computed.tokens[:TOKENS]

    cell.driven.give(admit(tokens, cell.table.tolist()), batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ("r",)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("recomputed", [0, 2, 3])
def test_a_failed_load_voids_what_stands_on_it(recomputed: int, layer: int, make_cell: MakeCell) -> None:
    """Nothing counts as restored, but the hidden states are not to blame: nothing is refused, and usage is taken
    back.
    """
    cell = make_cell(chunks=[32, 96, SUFFIX])
    loaded = Loaded(cell)
    loaded.pool.pages[1, layer, 9] ^= 1

    cell.driven.give(
        cell.admission(cell.table, cached=32, host_tokens=32),
        batch(loads=[loaded.order], restores=[cell.restore(32, TOKENS, recomputed=recomputed)]),
    )
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert (done.failed, done.restores_refused, done.restored_tokens) == (("r",), (), 0)
    assert len(done.load_failures) == 1
    cell.driven.give(batch(chunk(0, 32)), batch(chunk(32, TOKENS)))
    assert cell.go_on() == cell.answer
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.host_tokens, usage.hidden_tokens, usage.computed_tokens) == (0, 0, TOKENS + SUFFIX)


def test_a_refusal_undoes_the_loads_of_its_request(make_cell: MakeCell) -> None:
    """The scheduler undoes a failed request's loads, so nobody who stands on them may be computed in that batch."""
    cell = make_cell(chunks=[32, 96, SUFFIX])
    loaded = Loaded(cell)
    cell.pool.pages[cell.state[7], 0, 3] ^= 1
    shared = np.concatenate((cell.table[:2], cell.other[2:]))

    cell.driven.give(
        cell.admission(cell.table, cached=32, host_tokens=32),
        cell.admission(shared, request_id="sharer", cached=32, host_tokens=32),
        batch(chunk(32, TOKENS, request_id="sharer"), loads=[loaded.order], restores=[cell.restore(32, TOKENS)]),
    )
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert sorted(done.failed) == ["r", "sharer"]
    assert done.restores_refused == ("r",)
    assert (done.computed_tokens, done.load_failures) == (0, ())


def test_what_stands_on_restored_pages_falls_with_them(make_cell: MakeCell) -> None:
    """A chunk and a second restoration on pages whose restoration is refused in the same batch are not computed."""
    cell = make_cell()
    flip(cell)
    twin = cell.driven.host_pool(8, storage_id="twin", geometry=cell.geometry)
    cell.computed.write(twin, range(8))
    both = [np.concatenate((cell.table[:6], cell.other[start : start + 3])) for start in (6, 9)]

    cell.driven.give(
        cell.admission(cell.table),
        cell.admission(both[0], request_id="chunk", cached=96),
        cell.admission(both[1], request_id="restored", cached=96),
        batch(
            chunk(96, TOKENS, request_id="chunk"),
            restores=[
                cell.restore(0, 96),
                cell.computed.restore_chunk(96, 128, [6, 7], request_id="restored", storage_id="twin"),
            ],
        ),
    )
    cell.driven.run()
    done = cell.driven.done()[-1]

    assert sorted(done.failed) == ["chunk", "r", "restored"]
    assert (done.restores_refused, done.restored_tokens, done.computed_tokens) == (("r",), 0, 0)


def test_requests_of_an_adapter_are_not_restored(make_cell: MakeCell) -> None:
    """Hidden states are projected by the base model's layers, so the run is rejected."""
    cell = make_cell()
    cell.driven.give(cell.admission(cell.table))
    cell.driven.run()
    cell.driven.executor._roster.requests["r"].adapter = "1" * 32

    cell.driven.give(batch(restores=[cell.restore(0, TOKENS)]))
    cell.driven.run()

    done = cell.driven.done()[-1]
    assert (done.failed, done.restores_refused) == (("r",), ())
