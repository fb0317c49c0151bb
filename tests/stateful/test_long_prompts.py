"""Sessions of very long prompts: what a turn puts into the stream of inputs is what is new in it."""

from __future__ import annotations

import msgspec

from services.gateway.pending import Choice
from services.gateway.prompt_bases import PromptBases
from shared.codec import encode
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig
from shared.messages.requests import SamplingParams, SubmitRequest
from shared.messages.worker_plans import WorkerPlan
from shared.prompt_chain import block_digests
from tests.stateful.cell_model import CellModel, namespace

PAGE = 512
LONG = 130_000
LARGEST = 1_048_576
MOST_PAYLOAD = 8 * 1024**2  # Of the broker that ``thermocline up`` starts.


def cell_of(tokens: int) -> CellModel:
    """A cell whose device holds so many tokens."""
    cell = CellModel(CellConfig(lease_tokens=PAGE, max_batch_tokens=16_384), page_size=PAGE)
    cell.steps_a_check = 1_000_000
    cell.add_worker("worker-0", pages=-(-tokens // PAGE) + 1, max_context=tokens)
    return cell


class Session:
    """A conversation at one gateway."""

    def __init__(self, cell: CellModel, tokens: int) -> None:
        self.cell = cell
        self.bases = PromptBases()
        self.tokens = [number % 50_000 for number in range(tokens)]
        self.turns = 0

    def turn(self, new: list[int]) -> int:
        """Go on with these tokens; returns how many bytes the stream got."""
        self.turns += 1
        self.tokens += new
        request = SubmitRequest(
            request_id=f"request-{self.turns}",
            gateway_id="gateway",
            namespace=namespace(),
            prompt=pack_int32(self.tokens),
            sampling=SamplingParams(max_tokens=4, seed=self.turns, ignore_eos=True),
        )
        choice = Choice(request, 0, 0, 0.0)
        choice.blocks = block_digests(request.namespace, request.prompt)
        gateway, first = self.cell.gateway("gateway"), len(self.cell.log)
        self.cell.submitted[request.request_id] = gateway.open[request.request_id] = request
        gateway.tokens[request.request_id], gateway.attempts[request.request_id] = [], 1
        self.cell.feed(self.bases.abridged(request, choice.blocks))
        self.cell.drain(steps_a_check=1_000_000)
        output = gateway.tokens[request.request_id]
        assert len(output) == 4
        self.bases.answered(request, choice.blocks, output)
        self.tokens += output
        return sum(len(encode(each.input)) for each in self.cell.log[first:])


def test_a_turn_of_a_long_session_costs_what_is_new_in_it() -> None:
    """Of 130,000 tokens before it a turn says nothing again: at most 10 KB, and four bytes a new token."""
    cell = cell_of(LONG + 10_000)
    session = Session(cell, LONG)
    first = session.turn([])

    new = [[7] * count for count in (1, 300, 1_100, 5, 2_500)]
    told = [session.turn(tokens) for tokens in new]

    assert first > 4 * LONG
    for tokens, nbytes in zip(new, told, strict=True):
        assert nbytes <= 10_000 + 4 * len(tokens)
    assert cell.state.counters["bases_resolved"] == len(new)
    assert len(msgspec.msgpack.encode(cell.state.blocks)) < 40 * len(cell.state.blocks)
    assert len(cell.state.blocks) == len(session.tokens) // 1_024


def test_a_context_of_a_million_tokens_is_served() -> None:
    """Neither its submission nor what the worker is told of it exceeds what the broker takes."""
    cell = cell_of(LARGEST + PAGE)
    session = Session(cell, LARGEST - 8)

    first = session.turn([1, 2])
    second = session.turn([3])

    assert first > 4 * (LARGEST - 8)
    assert second < 20_000
    assert max(len(encode(each.input)) for each in cell.log) < MOST_PAYLOAD
    assert (
        max(len(encode(plan)) for outputs in cell.outputs for plan in outputs if isinstance(plan, WorkerPlan))
        < MOST_PAYLOAD
    )
