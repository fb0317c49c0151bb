"""Prompts that come as a base and a tail: resolved to the same prompt, or asked for whole, and never to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.scheduler.core import decode_state, encode_state
from services.scheduler.core.cache import prompt_blocks
from services.scheduler.core.cache.prefix_match import match_prefix
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.gateway_notices import PromptWanted, RequestFailed
from shared.messages.requests import PromptBase, ReclaimRequest, SubmitRequest
from shared.messages.worker_plans import AdmitRequest
from shared.prompt_chain import block_digests
from tests.small_blocks import small_blocks
from tests.stateful.cell_model import CellModel, abridged, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders

PROMPT = list(range(1, 41))
BASE = 32  # Two blocks of it.


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    """Blocks of 16 tokens."""
    with small_blocks(16):
        yield


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell that has answered PROMPT."""
    made: CellModel = make_cell(pages=64)
    made.serve(PROMPT)
    return made


def message(cell: CellModel, tokens: list[int], **changes: Any) -> SubmitRequest:
    """A whole request of these tokens, not fed."""
    first = next(iter(cell.submitted.values()))
    return msgspec.structs.replace(first, request_id="new", prompt=pack_int32(tokens), **changes)


def test_a_base_and_a_tail_are_the_whole_prompt(cell: CellModel) -> None:
    """The next turn says what is new, is admitted like the whole prompt, and gets the same tokens."""
    turn = [*PROMPT, 5, 6, 7]

    name = cell.serve(turn, base_tokens=BASE)

    assert cell.state.counters["bases_resolved"] == 1
    assert cell.admitted[-1].tokens == pack_int32(turn)
    assert cell.admitted[-1].cached_tokens == len(PROMPT)
    assert cell.gateways["gateway"].ended[name] == "finished"


def test_the_answer_may_be_a_part_of_the_base(cell: CellModel) -> None:
    """What was sampled is held like what was asked, but for the last token, whose KV nobody has."""
    name = cell.serve(PROMPT, max_tokens=12, ignore_eos=True)
    history = PROMPT + cell.gateways["gateway"].tokens[name]

    cell.serve([*history, 9], base_tokens=48)

    assert cell.state.counters["bases_resolved"] == 1


def test_a_base_on_a_base_is_noted(cell: CellModel) -> None:
    """A request that came by reference is referred to in its turn, although its front was never hashed again."""
    longer = PROMPT + list(range(100, 130))
    cell.serve(longer, base_tokens=BASE)

    cell.serve([*longer, 9], base_tokens=64)

    assert cell.state.counters["bases_resolved"] == 2


def test_a_base_that_is_gone_is_asked_for(cell: CellModel) -> None:
    """The scheduler forgets the request and says so; told whole, it is answered."""
    cell.feed(FlushCache(call_id="all"))
    name = cell.submit([*PROMPT, 5], base_tokens=BASE)

    (wanted,) = orders(cell.outputs[-1], PromptWanted)
    assert wanted.request_id == name
    assert name not in cell.state.requests
    cell.drain()
    assert cell.gateways["gateway"].ended[name] == "finished"


def test_a_base_stays_when_its_node_is_split(cell: CellModel) -> None:
    """Another prompt that leaves the first within a block cuts its node; the base is still the first one's."""
    cell.serve(PROMPT[:20] + [70] * 20)

    cell.serve([*PROMPT, 5], base_tokens=BASE)

    assert cell.state.counters["bases_resolved"] == 1


def test_a_shared_block_stays_when_the_prompt_that_brought_it_goes(make_cell: MakeCell) -> None:
    """Who shares a block notes it with the part of the tree that all share, which is evicted last."""
    cell = make_cell(pages=24)
    for prompt in (PROMPT, PROMPT[:20] + [70] * 20, PROMPT[:20] + [71] * 50):
        cell.serve(prompt)
    assert cell.state.counters["evicted_pages_device"] > 0
    (shared, _), *_ = match_prefix(cell.state.tree, namespace(), pack_int32(PROMPT[:20]), 5)

    assert shared.end == 20
    digest = block_digests(namespace(), pack_int32(PROMPT[:16]))
    assert cell.state.blocks[digest].node == shared.id
    cell.submit([*PROMPT[:20], 5], base_tokens=16)
    cell.serve([*PROMPT, 5], base_tokens=BASE)

    assert cell.state.counters["bases_resolved"] == 1
    assert cell.state.counters["prompts_wanted"] == 1


def test_a_digest_stands_for_its_namespace(cell: CellModel) -> None:
    """Another tenant's request cannot get at a prompt by its digest."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)

    outputs = cell.feed(msgspec.structs.replace(told, namespace=namespace("other")))

    assert orders(outputs, PromptWanted)
    assert not orders(outputs, AdmitRequest)


@pytest.mark.parametrize("tokens", [16, 17, 33, 48, 1_600])
def test_a_base_of_another_length_is_not_taken(cell: CellModel, tokens: int) -> None:
    """A digest stands for one number of tokens."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)
    assert told.base is not None

    outputs = cell.feed(msgspec.structs.replace(told, base=PromptBase(digest=told.base.digest, tokens=tokens)))

    assert orders(outputs, PromptWanted)
    assert "new" not in cell.state.requests


@pytest.mark.parametrize(
    "change",
    [
        {"tail": b""},
        {"tail": b"abc"},
        {"prompt": pack_int32([1])},
        {"base": PromptBase(digest=b"short", tokens=32)},
        {"base": PromptBase(digest=b"", tokens=32)},
        {"base": PromptBase(digest=b"0" * 16, tokens=0)},
        {"base": PromptBase(digest=b"0" * 16, tokens=-32)},
    ],
)
def test_what_is_no_base_is_refused(cell: CellModel, change: dict[str, Any]) -> None:
    """A senseless base or tail is answered, and nothing is computed."""
    told = msgspec.structs.replace(abridged(message(cell, [*PROMPT, 5]), BASE), **change)

    outputs = cell.feed(told)

    assert [refusal.code for refusal in orders(outputs, RequestFailed)] == ["invalid_request"]
    assert "new" not in cell.state.requests


def test_a_release_that_knows_no_bases_refuses(cell: CellModel) -> None:
    """It reads no such fields, and so an empty prompt: it never computes the tail alone."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)

    outputs = cell.feed(msgspec.structs.replace(told, base=None, tail=b""))

    assert [refusal.code for refusal in orders(outputs, RequestFailed)] == ["invalid_request"]


def test_a_repeated_request_wants_nothing(cell: CellModel) -> None:
    """One that is under way is not asked for again, though its base has gone meanwhile."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)
    cell.feed(told)
    cell.state.blocks.clear()

    outputs = cell.feed(told)

    assert outputs == []
    assert cell.state.counters["duplicate_requests"] == 1


def test_a_full_queue_refuses_a_base_by_the_length_of_its_prompt(make_cell: MakeCell) -> None:
    """The bound counts what the prompt will be."""
    cell = make_cell(pages=64, max_queued_tokens=42)
    cell.serve(PROMPT)

    outputs = cell.feed(abridged(message(cell, [*PROMPT, 5, 6, 7]), BASE))

    assert [refusal.code for refusal in orders(outputs, RequestFailed)] == ["queue_full"]


def test_a_request_is_reclaimed_whole_or_not_at_all(cell: CellModel) -> None:
    """No gateway reclaims by reference."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)

    outputs = cell.feed(ReclaimRequest(submit=told))

    assert outputs == []
    assert cell.state.counters["stale_inputs"] == 1


def test_what_is_not_cached_is_not_referred_to(make_cell: MakeCell) -> None:
    """A request that writes no cache leaves nothing to refer to."""
    cell = make_cell(pages=64)
    cell.serve(PROMPT, write=False)

    cell.submit([*PROMPT, 5], base_tokens=BASE)

    assert orders(cell.outputs[-1], PromptWanted)


def test_a_snapshot_has_the_table(cell: CellModel) -> None:
    """A fold that goes on from one resolves like one that never stopped."""
    told = abridged(message(cell, [*PROMPT, 5]), BASE)
    restored = decode_state(encode_state(cell.state))

    assert restored.blocks == cell.state.blocks
    assert list(restored.blocks) == list(cell.state.blocks)
    cell.state = restored
    cell.feed(told)
    assert cell.state.requests["new"].submit == message(cell, [*PROMPT, 5])


def test_the_table_is_bounded(cell: CellModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used longest ago is forgotten first; use keeps."""
    monkeypatch.setattr(prompt_blocks, "MOST_BLOCKS", 4)
    cell.serve([*PROMPT[:16], 5], base_tokens=16)
    for start in (100, 200):
        cell.serve(list(range(start, start + 18)))
        cell.serve([*PROMPT[:16], 5], base_tokens=16)
    cell.serve(list(range(300, 318)))

    cell.submit([*PROMPT[:16], 6], base_tokens=16)

    assert len(cell.state.blocks) == 4
    assert cell.state.counters["bases_resolved"] == 4
    cell.submit([*PROMPT, 6], base_tokens=32)
    assert cell.state.counters["prompts_wanted"] == 1
