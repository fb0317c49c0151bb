"""Groups of ranks read prefixes in part as a single worker does: they choose the same, and no failure stops a rank."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from msgspec import structs
from msgspec.structs import replace

from services.worker.detokenizer import Vocabulary
from services.worker.importance.important_prefix import ImportantPrefix
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.group_runner import GroupRunner
from services.worker.parallel.orders import RunStep, TokensChosen
from shared.errors import SparsePrefixLost
from shared.memory import unlink_all
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import AdmitRequest
from tests.reference import LOGIT_MARGIN
from tests.unit.worker.driven_executor import admit, batch, chunk, preempt
from tests.unit.worker.importance.sparse_cell import ANSWER, GREEDY, MakeCell, SparseCell
from tests.unit.worker.parallel.groups import SHM_PREFIX, group_of

pytestmark = pytest.mark.timeout(1800)

TOLD_S = 60.0
"""Another thread waits for ranks to end, and then tells."""

CheckpointOf = Callable[[str], Path]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Whatever a test ends with, its segments do not stay."""
    yield
    unlink_all(SHM_PREFIX)


@contextmanager
def group_cell(model: Path, ranks: int) -> Iterator[SparseCell]:
    """A cell whose runner is a group."""
    with group_of(model, ranks, pages=160) as group:
        cell = SparseCell(group, Vocabulary.from_directory(model))
        yield cell
        cell.driven.close()


def logging_orders(group: GroupRunner) -> list[Any]:
    """The orders to the other ranks from now on."""
    orders: list[Any] = []
    ranks = group._ranks
    tell = ranks.tell

    def telling(order: Any) -> None:
        orders.append(order)
        tell(order)

    ranks.tell = telling  # type: ignore[method-assign]
    return orders


def asked(cell: SparseCell, order: AdmitRequest, chunks: list[tuple[int, int]]) -> ImportantPrefix:
    """Have ``order`` computed in these chunks and answered; what its layers chose."""
    name = order.request_id
    cell.driven.give(order, *(batch(chunk(*span, request_id=name)) for span in chunks))
    cell.driven.run(most=len(chunks))
    prefix = cell.driven.sparse._opened[name].prefix
    cell.driven.run()
    assert [done.failed for done in cell.driven.done()[-len(chunks) :]] == [()] * len(chunks)
    return prefix


def decided_question(cell: SparseCell, **how: Any) -> tuple[list[int], ImportantPrefix, list[int]]:
    """A prompt to whose lossy answer rounding decides no token, what is chosen for it, and the answer."""
    for seed in range(1, 40):
        prompt, name = cell.prompt(20, seed), f"question-{seed}"
        wanted = structs.replace(cell.sparse(prompt, name, **how), sampling=replace(GREEDY, logprobs=2))
        prefix = asked(cell, wanted, [(192, 205), (205, 212)])
        found = [each for item in cell.driven.items(name) for each in item.logprobs]
        cell._free += unpack_int32(wanted.pages)[192 // cell.size :] + unpack_int32(wanted.sparse.pages)  # type: ignore[union-attr]
        if all(each.top[0][1] - each.top[1][1] > LOGIT_MARGIN for each in found):
            return prompt, prefix, cell.driven.tokens(name)
    raise AssertionError("rounding decides a token of each answer")


def check_choices(cell: SparseCell, single: SparseCell, metric: str) -> ImportantPrefix:
    """The same tokens of every layer and head as in a single worker, as many bytes for the same purposes, and the same
    answer, in several chunks and decode steps. With all of the prefix kept the answer is the exact one.
    """
    how: dict[str, Any] = {"ratio": 0.25, "metric": metric}
    prompt, expected, answer = decided_question(single, **how)
    cell.driven.give(cell.exact(prompt, "exact"), batch(chunk(192, 212, request_id="exact")))
    cell.driven.run()
    cell.kv = single.kv  # Chunks on a disk know nothing of ranks.

    found = asked(cell, cell.sparse(prompt, "lossy", **how), [(192, 205), (205, 212)])
    asked(cell, cell.sparse(prompt, "all"), [(192, 212)])

    assert found.positions.keys() == expected.positions.keys() == set(range(cell.runner.geometry.layers))
    for layer, tokens in expected.positions.items():
        assert torch.equal(found.positions[layer], tokens)
    for layer, identified in expected.identifications.items():
        assert found.identifications[layer].accepted == identified.accepted
    assert found.bytes_read.by_kind() == expected.bytes_read.by_kind()
    assert cell.driven.tokens("lossy") == answer
    assert cell.driven.tokens("all") == cell.driven.tokens("exact")
    return found


@pytest.mark.parametrize(
    ("family", "ranks", "metric"),
    [
        ("agreeing", 2, "h2o"),  # Three probe heads on two ranks, which agree.
        ("llama", 4, "max"),  # Two ranks for each KV head, with half of its query heads each.
        ("mistral", 2, "last_pooled"),  # Windows, and two query heads for each KV head.
    ],
)
def test_a_group_chooses_and_answers_as_a_single_worker(
    family: str, ranks: int, metric: str, make_cell: MakeCell, checkpoint_of: CheckpointOf
) -> None:
    """Wherever probe heads lie. The document's own pages are poisoned from where it is read in part."""
    single = make_cell(family)
    with group_cell(checkpoint_of(family), ranks) as cell:
        found = check_choices(cell, single, metric)
        cell.forget(64)
        asked(cell, cell.sparse(cell.prompt(20, seed=50), "poisoned"), [(192, 212)])
        cell.driven.give(admit(cell.prompt(20, seed=50), cell.take(224), request_id="computed", params=GREEDY))
        cell.driven.give(batch(chunk(0, 212, request_id="computed")))
        cell.driven.run()

        assert cell.driven.tokens("poisoned") == cell.driven.tokens("computed")
        if family == "agreeing":
            assert all(identified.accepted for identified in found.identifications.values())


def test_failures_end_a_lossy_request_alone_and_exact_ones_are_as_ever(
    make_cell: MakeCell, checkpoint_of: CheckpointOf
) -> None:
    """Every head chooses for itself. Then reads that fail in one batch with others, a failing load before the prefix,
    and a preemption: the group goes on, and the ranks are told of parts only in steps that have some, and of their
    end. A rank that ends while a prefix is read ends the group, and no request is blamed.
    """
    with group_cell(checkpoint_of("llama_mha"), 2) as cell:
        found = check_choices(cell, make_cell("llama_mha"), "h2o")
        assert not any(identified.accepted for identified in found.identifications.values())
        assert isinstance(cell.runner, GroupRunner)
        orders = logging_orders(cell.runner)
        prompts = {name: cell.prompt(9 + seed, seed) for seed, name in enumerate("abcd")}
        for name, prompt in prompts.items():
            cell.driven.give(cell.exact(prompt, f"exact-{name}"))
            cell.driven.give(batch(chunk(192, len(prompt), request_id=f"exact-{name}")))
        cell.driven.run()
        assert {type(order) for order in orders} == {RunStep}
        assert not any(order.in_part for order in orders)
        expected = {name: cell.driven.tokens(f"exact-{name}") for name in prompts}
        check_refusals(cell, prompts, expected)
        check_load_that_fails(cell, prompts["a"], expected["a"])
        check_preemption(cell, prompts["b"], expected["b"])

        orders.clear()
        cell.driven.give(cell.exact(prompts["c"], "last"), batch(chunk(192, len(prompts["c"]), request_id="last")))
        cell.driven.run()
        assert cell.driven.tokens("last") == expected["c"]
        assert {type(order) for order in orders} == {RunStep}
        assert not any(order.in_part for order in orders)
        assert not cell.runner._numbers
        assert not cell.runner._prefixes._opened
        check_rank_that_ends(cell, cell.runner, orders)


def check_refusals(cell: SparseCell, prompts: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """Two prefixes of a batch cannot be read from some layer on, in one way and another; a third one can."""
    faults = deque([(0, SparsePrefixLost), (None, SparsePrefixLost), (2, ZeroDivisionError)])

    def prepare(source: Any) -> None:
        source.lost_from, source.error = faults.popleft()

    cell.prepare = prepare  # type: ignore[method-assign]
    cell.driven.give(*(cell.sparse(prompts[name], name) for name in "abc"), cell.exact(prompts["d"], "d"))
    cell.driven.give(batch(*(chunk(192, len(prompts[name]), request_id=name) for name in "abcd")))
    cell.driven.run()
    cell.prepare = lambda source: None  # type: ignore[method-assign]

    done = cell.driven.done()[-1]
    assert sorted(done.failed) == sorted(done.sparse_refused) == ["a", "c"]
    assert [loaded.request_id for loaded in done.sparse_loaded] == ["b"]
    assert {name: cell.driven.tokens(name) for name in "bd"} == {name: expected[name] for name in "bd"}
    assert cell.driven.items("a") == cell.driven.items("c") == []


def check_load_that_fails(cell: SparseCell, prompt: list[int], expected: list[int]) -> None:
    """Nothing is chosen on pages that a failed load leaves undefined."""
    host, load = cell.back_up(64)
    good = host.pages[1].copy()
    host.pages[1, 0, 0] ^= 1
    opened = len(cell.sources)
    cell.driven.give(cell.sparse(prompt, "r", before=unpack_int32(load.device_pages)))
    cell.driven.give(batch(chunk(192, len(prompt)), loads=[load]))
    cell.driven.run()
    assert cell.driven.done()[-1].failed == ("r",)
    assert cell.driven.done()[-1].sparse_refused == ()
    assert [source.reads for source in cell.sources[opened:]] == [0]

    host.pages[1] = good
    cell.driven.give(batch(chunk(192, len(prompt)), loads=[load]))
    cell.driven.run()
    assert cell.driven.done()[-1].failed == ()
    assert cell.driven.tokens("r") == expected


def check_preemption(cell: SparseCell, prompt: list[int], expected: list[int]) -> None:
    """The next attempt chooses anew."""
    cell.driven.give(cell.sparse(prompt, "p"), batch(chunk(192, len(prompt), request_id="p")))
    cell.driven.run(most=5)
    cell.driven.give(preempt("p"))
    cell.driven.run()
    (ended,) = cell.driven.preempted()
    output = unpack_int32(ended.output)
    assert 0 < len(output) < ANSWER

    again = cell.sparse(prompt + output, "p", attempt=2, prompt_tokens=len(prompt))
    cell.driven.give(again, batch(chunk(192, len(prompt) + len(output), request_id="p", attempt=2)))
    cell.driven.run()
    assert unpack_int32(cell.driven.finished()[-1].output) == expected


def check_rank_that_ends(cell: SparseCell, group: GroupRunner, orders: list[Any]) -> None:
    """It is killed when two layers have chosen."""
    (pid,) = group.rank_pids.values()
    lost: SimpleQueue[GroupLost] = SimpleQueue()
    group.on_lost(lost.put)
    orders.clear()

    def end_rank() -> None:
        if sum(isinstance(order, TokensChosen) for order in orders) == 2:
            os.kill(pid, signal.SIGKILL)

    cell.prepare = lambda source: setattr(source, "on_read", end_rank)  # type: ignore[method-assign]
    cell.driven.give(cell.sparse(cell.prompt(9, seed=1), "k"), batch(chunk(192, 201, request_id="k")))
    with pytest.raises(GroupLost):
        cell.driven.run()

    assert lost.get(timeout=TOLD_S)
    assert lost.empty()
    assert cell.driven.items("k") == []


def test_attention_that_knows_no_parts_is_refused_in_a_group_too(checkpoint_of: CheckpointOf) -> None:
    """Sinks: the request is computed instead, and the ranks go on."""
    with group_cell(checkpoint_of("gpt_oss"), 2) as cell:
        prompt = cell.prompt(9, seed=1)
        cell.driven.give(cell.sparse(prompt, "r"), batch(chunk(192, 201)))
        cell.driven.run()
        assert cell.driven.done()[-1].sparse_refused == ("r",)

        cell.driven.give(cell.exact(prompt, "exact"), batch(chunk(192, 201, request_id="exact")))
        cell.driven.run()
        assert len(cell.driven.tokens("exact")) == ANSWER
