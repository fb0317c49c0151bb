"""Sparse prefixes that cannot be read, and loads before them that fail: nobody computes on what is not there."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from services.worker.kv.layer_gate import LayerGate
from services.worker.passes import LONE_FAILURES
from services.worker.step_results import REQUEST_FAILURES
from services.worker.steps import Work
from shared.errors import IntegrityError, SparsePrefixLost
from shared.messages.base import pack_int32, unpack_int32
from tests.engine_driver import random_prompt
from tests.unit.worker.driven_executor import admit, batch, chunk
from tests.unit.worker.importance.sparse_cell import ANSWER, GREEDY, MakeCell, OnDisk, SparseCell

POISON = 5
"""No ordinary token of a random prompt."""


def exact_answers(cell: SparseCell, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """What exact requests say; their names begin with "exact"."""
    for name, prompt in prompts.items():
        cell.driven.give(
            cell.exact(prompt, f"exact-{name}"), batch(chunk(192, len(prompt), request_id=f"exact-{name}"))
        )
    cell.driven.run()
    return {name: cell.driven.tokens(f"exact-{name}") for name in prompts}


def losing(layer: int | None, error: type[Exception] = SparsePrefixLost) -> Callable[[OnDisk], None]:
    """Sources whose reads fail from ``layer`` on."""

    def prepare(source: OnDisk) -> None:
        source.lost_from, source.error = layer, error

    return prepare


def poisoned(cell: SparseCell) -> None:
    """Forward passes with a certain token raise, as soon as attention would have begun."""

    def raising(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            if POISON in ids.tolist():
                raise RuntimeError("out of memory")
            return compute(ids, *rest)

        return step

    cell.runner.run = raising(cell.runner.run)  # type: ignore[method-assign]
    cell.runner.forward = raising(cell.runner.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layer", "error"), [(0, SparsePrefixLost), (2, SparsePrefixLost), (0, IntegrityError), (2, ZeroDivisionError)]
)
def test_a_prefix_that_cannot_be_read_fails_its_request_alone(
    layer: int, error: type[Exception], make_cell: MakeCell
) -> None:
    """In one batch: two that fail, a sparse one that does not, an exact chunk, and one that decodes."""
    cell = make_cell("llama_mha")
    prompts = {name: cell.prompt(9 + seed, seed) for seed, name in enumerate("abcde")}
    expected = exact_answers(cell, prompts)
    cell.driven.give(cell.exact(prompts["e"], "e"), batch(chunk(192, 205, request_id="e")))
    cell.driven.run(most=2)
    faults = deque([layer, None, layer])
    cell.prepare = lambda source: losing(faults.popleft(), error)(source)  # type: ignore[method-assign]

    cell.driven.give(*(cell.sparse(prompts[name], name) for name in "abc"), cell.exact(prompts["d"], "d"))
    cell.driven.give(batch(*(chunk(192, len(prompts[name]), request_id=name) for name in "abcd")))
    cell.driven.run()

    done = cell.driven.done()[-1]
    assert sorted(done.failed) == sorted(done.sparse_refused) == ["a", "c"]
    assert [loaded.request_id for loaded in done.sparse_loaded] == ["b"]
    assert {name: cell.driven.tokens(name) for name in "bde"} == {name: expected[name] for name in "bde"}
    assert cell.driven.items("a") == cell.driven.items("c") == []
    counters = cell.driven.executor.counters
    assert (counters.sparse_prefixes_refused, counters.sparse_prefixes_loaded) == (2, 1)
    assert (counters.compute_failures, counters.steps_repeated) == (0, 2)


def test_a_refused_request_is_never_given_up_by_the_worker(make_cell: MakeCell) -> None:
    """Neither it nor the worker is to blame, however often that happens; when the disk is back it is computed."""
    cell = make_cell("llama_mha")
    prompt = cell.prompt(9, seed=1)
    expected = exact_answers(cell, {"r": prompt})["r"]
    cell.prepare = losing(1)  # type: ignore[assignment, method-assign]
    times = max(LONE_FAILURES, REQUEST_FAILURES) + 1
    cell.driven.give(cell.sparse(prompt, "r"), *[batch(chunk(192, 201)) for _ in range(times)])
    cell.driven.run()
    assert [done.sparse_refused for done in cell.driven.done()[-times:]] == [("r",)] * times

    cell.prepare = losing(None)  # type: ignore[assignment, method-assign]
    cell.driven.give(batch(chunk(192, 201)))
    cell.driven.run()

    assert cell.driven.tokens() == expected


def test_an_exact_attempt_follows_a_refused_one(make_cell: MakeCell) -> None:
    """The newer attempt replaces it, and its usage knows nothing of importance."""
    cell = make_cell("llama")
    prompt = cell.prompt(9, seed=1)
    expected = exact_answers(cell, {"r": prompt})["r"]
    cell.prepare = losing(0)  # type: ignore[assignment, method-assign]
    cell.driven.give(cell.sparse(prompt, "r"), batch(chunk(192, 201)))
    cell.driven.run()

    again = admit(prompt, cell.take(201 + ANSWER), attempt=2, params=GREEDY)
    cell.driven.give(again, batch(chunk(0, 201, attempt=2)))
    cell.driven.run()

    assert cell.driven.tokens() == expected
    usage = cell.driven.items()[0].usage
    assert usage is not None
    assert (usage.sparse_tokens, usage.importance, usage.computed_tokens) == (0, None, 201)


def test_a_worker_that_reads_nothing_sparse_refuses(make_cell: MakeCell) -> None:
    """The scheduler finds another way; the request is not refused as such."""
    cell = make_cell("llama")
    cell.driven.sparse._open_source = None

    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "r"), batch(chunk(192, 201)))
    cell.driven.run()

    assert cell.driven.done()[-1].sparse_refused == cell.driven.done()[-1].failed == ("r",)
    assert [each.request_id for each in cell.driven.finished()] == ["document"]


def test_requests_are_told_apart_where_one_is_broken_and_another_refused(make_cell: MakeCell) -> None:
    """When each is computed alone, a prefix that cannot be read is still nobody's fault."""
    cell = make_cell("llama_mha")
    prompts = {"r": cell.prompt(9, seed=1), "good": cell.prompt(7, seed=2)}
    expected = exact_answers(cell, prompts)
    poisoned(cell)
    cell.prepare = losing(1)  # type: ignore[assignment, method-assign]
    bad = [*random_prompt(5, seed=3), POISON]

    cell.driven.give(admit(bad, cell.take(20), request_id="bad"), cell.exact(prompts["good"], "good"))
    cell.driven.give(cell.sparse(prompts["r"], "r"))
    cell.driven.give(
        batch(chunk(0, 6, request_id="bad"), chunk(192, 201), chunk(192, 199, request_id="good")),
    )
    cell.driven.run()

    done = cell.driven.done()[-1]
    assert (sorted(done.failed), done.sparse_refused) == (["bad", "r"], ("r",))
    assert cell.driven.executor.counters.compute_failures == 1
    assert cell.driven.tokens("good") == expected["good"]


def test_steps_of_which_nothing_is_left_but_refusals_blame_nobody(make_cell: MakeCell) -> None:
    """Each time the pass over both raises, and alone, their prefixes cannot be read: the worker goes on."""
    cell = make_cell("llama")
    run, passes = cell.runner.run, itertools.count()

    def failing_first(*arguments: Any) -> torch.Tensor:
        if not next(passes) % 3:
            raise RuntimeError("out of memory")
        return run(*arguments)

    cell.runner.run = failing_first  # type: ignore[assignment, method-assign]
    cell.prepare = losing(0)  # type: ignore[assignment, method-assign]
    cell.driven.give(*(cell.sparse(cell.prompt(9, seed=1), name) for name in "ab"))
    step = batch(chunk(192, 201, request_id="a"), chunk(192, 201, request_id="b"))

    cell.driven.give(*[step] * (LONE_FAILURES + 1))
    cell.driven.run()

    assert [sorted(done.sparse_refused) for done in cell.driven.done()[1:]] == [["a", "b"]] * (LONE_FAILURES + 1)


def test_loads_before_the_prefix_land_before_they_are_attended_to(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin when the first layer waits for them, and their device pages hold poison until then."""
    begun: deque[Callable[[], None]] = deque()
    cell = make_cell("llama_mha", submit=begun.append)
    prompt = cell.prompt(9, seed=1)
    expected = exact_answers(cell, {"r": prompt})["r"]
    _, load = cell.back_up(64)
    device = unpack_int32(load.device_pages)
    cell.runner.pool.tensor[:, :, device] = float("nan")
    wait = LayerGate.wait

    def waiting(gate: LayerGate, layer: int) -> None:
        if begun:
            threading.Thread(target=begun.popleft()).start()
        wait(gate, layer)

    monkeypatch.setattr(LayerGate, "wait", waiting)
    cell.driven.give(cell.sparse(prompt, "r", before=device), batch(chunk(192, 201), loads=[load]))
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ()
    assert cell.driven.tokens() == expected


@pytest.mark.parametrize("again", ["computed", "loaded"])
def test_a_request_goes_on_when_a_load_before_its_prefix_has_failed(again: str, make_cell: MakeCell) -> None:
    """When its beginning is computed, or loaded, anew; its usage does not count tokens that were lost."""
    cell = make_cell("llama_mha")
    prompt = cell.prompt(9, seed=1)
    expected = exact_answers(cell, {"r": prompt})["r"]
    host, load = cell.back_up(64)
    good = host.pages[1].copy()
    host.pages[1, 2, 0] ^= 1
    order = cell.sparse(prompt, "r", before=unpack_int32(load.device_pages))
    cell.driven.give(replace(order, host_tokens=64))
    cell.driven.give(batch(chunk(192, 201), loads=[load]), batch(chunk(192, 201)))
    cell.driven.run()
    first, second = cell.driven.done()[-2:]
    assert (first.failed, second.failed) == (("r",), ("r",))
    assert first.sparse_refused == second.sparse_refused == ()

    if again == "computed":
        cell.driven.give(batch(chunk(0, 40)), batch(chunk(40, 64)), batch(chunk(192, 201)))
    else:
        host.pages[1] = good
        cell.driven.give(batch(chunk(192, 201), loads=[load]))
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ()
    assert cell.driven.tokens() == expected
    usage = cell.driven.items()[0].usage
    assert usage is not None
    computed = 9 + (64 if again == "computed" else 0)
    assert (usage.sparse_tokens, usage.host_tokens, usage.computed_tokens) == (128, 0, computed)
    assert len(cell.driven.done()[-1].sparse_loaded) == 1


def test_what_was_chosen_on_kv_that_is_gone_is_void(make_cell: MakeCell) -> None:
    """The next step of the request chooses anew; a loss of tokens behind the prefix voids nothing."""
    cell = make_cell("llama_mha")
    cell.driven.give(cell.sparse(cell.prompt(40, seed=1), "r"), batch(chunk(192, 220)))
    cell.driven.run()
    request = cell.driven.executor._roster.requests["r"]
    work = [Work(request, 208, 220, samples=False, is_chunk=True)]
    chosen = cell.driven.sparse.needed_by(work)[0]

    assert request.lose_pages(frozenset({int(request.pages[13])})) == 12
    assert cell.driven.sparse.needed_by(work)[0] is chosen
    assert request.lose_pages(frozenset({int(request.pages[1])})) == 64 + 16 - 16
    again = cell.driven.sparse.needed_by(work)[0]

    assert chosen.is_complete
    assert not again.positions
    assert request.importance is None


def test_who_shares_a_load_with_a_refused_request_fails_with_it(make_cell: MakeCell) -> None:
    """The scheduler undoes the load as a whole, so the pages may not be computed on."""
    cell = make_cell("llama_mha")
    _, load = cell.back_up(64)
    device = unpack_int32(load.device_pages)
    cell.prepare = losing(2)  # type: ignore[assignment, method-assign]
    sharing = cell.document[:64] + random_prompt(6, seed=9)

    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "r", before=device))
    cell.driven.give(admit(sharing, [*device, *cell.take(6 + ANSWER)], request_id="q", cached=64, params=GREEDY))
    cell.driven.give(batch(chunk(192, 201), chunk(64, 70, request_id="q"), loads=[load]))
    cell.driven.run()

    done = cell.driven.done()[-1]
    assert (sorted(done.failed), done.sparse_refused) == (["q", "r"], ("r",))
    assert cell.driven.items("q") == []


def test_a_lost_request_is_not_refused_as_well(make_cell: MakeCell) -> None:
    """Its prefix cannot be read, but before that counts, a load that it stands on is undone with a rejected chunk."""
    cell = make_cell("llama_mha")
    _, load = cell.back_up(64)
    device = unpack_int32(load.device_pages)
    cell.prepare = losing(2)  # type: ignore[assignment, method-assign]
    other = cell.prompt(8, seed=2)
    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "r", before=device), cell.exact(other, "good"))
    cell.driven.give(admit(cell.document, [*device, *cell.take(128 + ANSWER)], request_id="q", cached=64))

    cell.driven.give(
        batch(
            chunk(192, 201),
            chunk(180, 193, request_id="q"),
            chunk(192, 200, request_id="good"),
            loads=[replace(load, request_id="q")],
        )
    )
    cell.driven.run()

    done = cell.driven.done()[-1]
    assert (sorted(done.failed), done.sparse_refused) == (["q", "r"], ())
    assert len(cell.driven.tokens("good")) == ANSWER


@pytest.mark.parametrize("span", [(60, 70), (64, 192), (100, 101), (100, 201), (0, 201)])
def test_tokens_of_the_prefix_are_never_computed(span: Sequence[int], make_cell: MakeCell) -> None:
    """They have no pages; such a chunk is rejected before anything is computed or written."""
    cell = make_cell("llama")
    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "r"))
    before = cell.runner.pool.tensor.clone()

    cell.driven.give(batch(chunk(*span)))
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ("r",)
    assert cell.driven.executor.counters.compute_failures == 0
    assert torch.equal(cell.runner.pool.tensor, before)


def test_a_load_that_names_no_page_brings_no_coverage(make_cell: MakeCell) -> None:
    """A broken order may name page -1, which stands for tokens of the prefix in page tables."""
    cell = make_cell("llama")
    _, load = cell.back_up(64)
    device = unpack_int32(load.device_pages)
    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "r", before=device))

    cell.driven.give(batch(chunk(192, 201), loads=[replace(load, device_pages=pack_int32([-1, *device[1:]]))]))
    cell.driven.run()

    assert cell.driven.done()[-1].failed == ("r",)
    assert cell.driven.items("r") == []
