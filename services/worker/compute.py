"""One forward pass over some work, and the repeats when it fails.

A forward pass may be repeated at will: it writes the same values to the same slots, and sampling is a pure function of
(seed, output position, logits). Where layers carry a state a pass overwrites the state it began with, so the next one
begins with the page that its row is in (``engine.states.running``). So tokens come only from a pass in which everything
was right:

1. all work together, loads running beside it;
2. if loads failed, again without the requests that they belong to;
3. if a sparse prefix could not be read, again without its request;
4. if the computation itself raised, each request alone, which shows whose fault it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from services.worker.answer_grammars import NextTokens
from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment
from services.worker.engine.paged_step import AttentionBackend
from services.worker.engine.sample_row import forbidden_ids, is_penalised
from services.worker.engine.sampler import Sampled, SampleRow, may_be_unread, prompt_logprobs, sample
from services.worker.engine.states.running import Key, StateSlots
from services.worker.engine.tables_ahead import TablesAhead
from services.worker.engine.token_masks import without
from services.worker.engine.unread_tokens import Following, UnreadTokens
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.selection_failed import SelectionFailed
from services.worker.kv.settled import raise_if_failed
from services.worker.parallel.group_lost import GroupLost
from services.worker.parallel.group_runner import GroupRunner
from services.worker.requests import RunningRequest
from services.worker.restore.first_layers import PassRunner
from services.worker.sparse_prefixes import SparsePrefixes
from services.worker.step_rows import StepRows
from services.worker.step_saving import NOT_SAVED, SavedStep
from services.worker.steps import Work
from shared.errors import UnsupportedModel
from shared.messages.tokens import TokenLogprob

LOGITS_BYTES = 64 * 2**20
"""Bound on the float32 logits of one pass over prompt rows (vocabularies reach 256k tokens)."""


class Launcher(Protocol):
    """Launches steps without waiting for their tokens; ``engine.model_runner.ModelRunner`` on a GPU."""

    def launch(
        self, ids: torch.Tensor | Following, positions: torch.Tensor, meta: ForwardMeta, rows: Sequence[SampleRow]
    ) -> UnreadTokens:
        """Launch a step of single rows, int64 [R] each, whose tokens the device chooses (``sampler.choose_unread``).

        The host reads nothing. Raises whatever the model raises; work launched until then is not awaited.
        """


class Runner(PassRunner, Protocol):
    """The part of ``engine.model_runner.ModelRunner`` that computing steps needs."""

    max_context: int
    vocab_size: int
    model_bytes: int  # Size of all weights, which a step on a CPU reads.
    eos_token_ids: tuple[int, ...]

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend of forward passes."""

    @property
    def mixes_adapters(self) -> bool:
        """Whether rows of LoRA adapters may share a pass with the base model's without changing the latter's bits."""

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of steps; None where the host chooses the tokens of a step before there can be a next one."""

    @property
    def state_slots(self) -> StateSlots:
        """Slots with which passes begin, for a model whose layers carry states; a new object at each access."""

    @property
    def lookup_obstacle(self) -> str:
        """Why prompt lookup proposes nothing here, or "": further rows of a step would change tokens, or not pay.

        A model that keeps more than K and V of each token, such as a state that every token changes, has this obstacle:
        rejected rows would have changed it.
        """

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one pass over ``ids`` and ``positions``, int64 [T]; write its KV to the pool.

        Return the logits of ``last_rows`` (int64 [R]), float32 [R, vocab].
        """

    def settle(self) -> None:
        """Return when the pool holds the KV of all steps so far. Raises what their kernels raised."""


@dataclass(slots=True)
class Computed:
    """Work that was computed.

    ``sampled`` are the tokens that it gave, in order, several where proposals were right. It is empty where the chunk
    does not end its request's tokens, and where the request's grammar is not compiled yet: its token is chosen later
    from ``held_logits``, float32 [vocab].
    """

    work: Work
    sampled: tuple[Sampled, ...] = ()
    held_logits: torch.Tensor | None = None
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # By prompt position.

    @property
    def accepted(self) -> int:
        """How many of the proposed tokens were right."""
        return max(0, len(self.sampled) - 1)


class StepComputer:
    """Runs steps of work on a model."""

    def __init__(
        self,
        runner: Runner,
        sparse: SparsePrefixes,
        *,
        rows: StepRows | None = None,
    ) -> None:
        """Prepare.

        ``sparse`` knows the sparse prefixes of the requests that are computed, ``rows`` bounds their passes.
        """
        self._rows, self._states = rows or StepRows(), runner.state_slots
        self._runner, self._sparse = runner, sparse
        self._tables = TablesAhead(runner.geometry.page_size, runner.pool.device)
        self._slice_rows = max(1, LOGITS_BYTES // (4 * runner.vocab_size))

    def compute(self, work: Sequence[Work], gate: LayerGate | None, saved: SavedStep = NOT_SAVED) -> list[Computed]:
        """Compute all of ``work`` in one pass, or in several where the device has no room for one.

        ``saved`` wraps each pass. When this returns the KV is in the pool, for every reader. Raises whatever the model,
        the sampler or the gate raises, and SelectionFailed for a sparse prefix; work launched until then is not
        awaited.
        """
        computed = self._launch(work, gate, saved)
        self._runner.settle()
        return computed

    def settle(self) -> None:
        """Return when no launched pass writes to the pool any more. Raises what that work raised."""
        self._runner.settle()

    def shrink(self, work: Sequence[Work]) -> bool:
        """Bound later passes below the size of ``work``; return False where that is one row already."""
        return self._rows.shrink(sum(item.rows for item in work))

    def _launch(self, work: Sequence[Work], gate: LayerGate | None, saved: SavedStep) -> list[Computed]:
        computed = [Computed(item.with_fewer(self._rows.at_most(item.rows))) for item in work]
        last_pieces = [self._compute_early_pieces(one, gate, saved) for one in computed]
        for places in self._mixtures(last_pieces):
            ones, pieces = [computed[place] for place in places], [last_pieces[place] for place in places]
            for part in self._rows.parts([piece.rows for piece in pieces]):
                self._launch_together(ones[part], pieces[part], gate, saved)
        return computed

    def _mixtures(self, work: Sequence[Work]) -> list[Sequence[int]]:
        """Return the places of ``work`` that may be computed together.

        All of them, or two lists where the base model's rows would be computed in another way beside those of adapters.
        """
        adapted = [place for place, item in enumerate(work) if item.request.adapter]
        if not 0 < len(adapted) < len(work) or self._runner.mixes_adapters:
            return [range(len(work))]
        return [[place for place, item in enumerate(work) if not item.request.adapter], adapted]

    def _launch_together(
        self, computed: Sequence[Computed], last_pieces: Sequence[Work], gate: LayerGate | None, saved: SavedStep
    ) -> None:
        """Launch one pass over the last piece of each work; give each its token and logprobs."""
        wanted = [[*_prompt_rows(piece), *_sampled_rows(piece)] for piece in last_pieces]
        for one in computed:
            if one.work.proposed and one.work.request.grammar is not None:
                one.work.request.grammar.look_ahead(one.work.proposed)
        logits = self._forward(last_pieces, wanted, gate, saved)
        ends = list(itertools.accumulate(len(rows) for rows in wanted))
        for one, piece, end, rows in zip(computed, last_pieces, ends, wanted, strict=True):
            scored = len(_prompt_rows(piece))
            if scored:
                begin = end - len(rows)
                one.prompt_logprobs.update(_score(piece, logits[begin : begin + scored]))
        sampling: list[Computed] = []
        chosen: list[int] = []
        sample_rows: list[list[SampleRow]] = []
        for one, end in zip(computed, ends, strict=True):
            if one.work.samples and _must_hold(one.work):
                one.held_logits = logits[end - 1].clone()
            elif one.work.samples:
                own = self._sample_rows(one.work)
                first = end - 1 - len(one.work.proposed)
                chosen += range(first, first + len(own))
                sampling.append(one)
                sample_rows.append(own)
        if sampling:
            if len(chosen) < len(logits):  # Copying all logits of a decode step would cost as much as choosing.
                logits = logits[chosen]
            drawn = iter(sample(logits, [row for own in sample_rows for row in own]))
            for one, own in zip(sampling, sample_rows, strict=True):
                one.sampled = _accepted(one.work.proposed, list(itertools.islice(drawn, len(own))))

    def launch(self, work: Sequence[Work], after: Following | None) -> UnreadTokens | None:
        """Launch one step of ``work`` behind the step ``after``, whose tokens it continues; None: the host knows them.

        The step is not awaited. Raises whatever the model raises. Returns None where a step has to be read before the
        next: it does not only decode, has more rows than a pass, or the host has a part in choosing its tokens.
        """
        launcher = self._runner.launcher
        if launcher is None or not 0 < len(work) == self._rows.at_most(len(work)):
            return None
        if any(_is_ordinary(item) for item in work):
            return None
        rows = [self._sample_row(item, None) for item in work]
        if not all(may_be_unread(row) for row in rows):
            return None
        starts = [(_key(item), item.start) for item in work]
        if not self._states.go_on(starts):
            return None
        segments = [
            Segment(1, item.start, item.request.pages, running=slot)
            for item, (_, slot) in zip(work, self._states.begin(starts), strict=True)
        ]
        meta = self._tables.of_step(segments, None)
        positions = torch.tensor([item.start for item in work], dtype=torch.int64)
        ids = after or torch.tensor([item.request.tokens[item.start] for item in work], dtype=torch.int64)
        tokens = launcher.launch(ids, positions, meta, rows)
        self._states.reached((key, start + 1) for key, start in starts)
        self._tables.expect_after(segments)
        return tokens

    def isolate(
        self, work: Sequence[Work], saved: SavedStep = NOT_SAVED
    ) -> tuple[list[Computed], list[tuple[Work, Exception]]]:
        """Compute each work alone; return what could be computed, and what could not with the reason.

        Raises GroupLost and DeviceFailed, which are no work's fault, and nothing else.
        """
        done: list[Computed] = []
        failed: list[tuple[Work, Exception]] = []
        for item in work:
            try:
                done += self.compute([item], None, saved)
            except GroupLost:
                raise
            except Exception as error:
                raise_if_failed(error)
                self.settle()
                saved.drop([item])
                failed.append((item, error))
        return done, failed

    def _compute_early_pieces(self, one: Computed, gate: LayerGate | None, saved: SavedStep) -> Work:
        """Compute all but the last piece of work that one pass has no room for; return the last piece.

        Where prompt logprobs are wanted every prompt row needs its logits, so pieces are as long as their bound allows.
        """
        rest = one.work
        while (rows := self._rows.at_most(self._slice_rows if _prompt_rows(rest) else rest.rows)) < rest.rows:
            piece = replace(rest, end=rest.start + rows, samples=False)
            scored = _prompt_rows(piece)
            logits = self._forward([piece], [scored], gate, saved)
            if scored:
                one.prompt_logprobs.update(_score(piece, logits))
            rest = replace(rest, start=piece.end)
        return rest

    def _forward(
        self, work: Sequence[Work], wanted: Sequence[Sequence[int]], gate: LayerGate | None, saved: SavedStep
    ) -> torch.Tensor:
        """Return logits of the rows ``wanted[i]`` (relative to work i), float32 [R, vocab]."""
        ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        segments: list[Segment] = []
        begun = self._states.begin([(_key(item), item.start) for item in work])
        for item, rows, (start, slot) in zip(work, wanted, begun, strict=True):
            last_rows += [len(ids) + item.start - start + row for row in rows]
            ids += [*item.request.tokens[start : item.end - len(item.proposed)], *item.proposed]
            positions += range(start, item.end)
            segments += _segments(item, start, slot)
        meta = self._tables.of_step(segments, gate)
        prefixes = self._sparse.needed_by(work)
        tensors = [torch.tensor(numbers, dtype=torch.int64) for numbers in (ids, positions, last_rows)]
        with saved.around(work, meta):
            if prefixes and isinstance(self._runner, GroupRunner):
                return self._runner.forward_in_part(tensors[0], tensors[1], meta, tensors[2], prefixes)
            if not prefixes:
                logits = self._runner.forward(tensors[0], tensors[1], meta, tensors[2])
                self._states.reached((_key(item), item.end) for item in work)
                self._tables.expect_after(segments)
                return logits
            try:
                backend = self._runner.attention
            except UnsupportedModel as error:
                raise SelectionFailed(next(iter(prefixes.values())).name) from error
            step = ImportanceStep(meta, self._runner.pool, backend, prefixes)
            return self._runner.run(tensors[0], tensors[1], step, tensors[2])

    def choose_held(self, requests: Iterable[RunningRequest]) -> list[Computed]:
        """Return the first tokens of requests whose logits were held and whose grammar is compiled now."""
        ready = [
            (Computed(Work(each, each.computed, each.computed, samples=True, is_chunk=False)), each.held_logits)
            for each in requests
            if each.held_logits is not None and each.grammar is not None and each.grammar.is_ready
        ]
        if ready:
            drawn = sample(
                torch.stack([logits for _, logits in ready]),
                [row for one, _ in ready for row in self._sample_rows(one.work)],
            )
            for (one, _), sampled in zip(ready, drawn, strict=True):
                one.sampled = (sampled,)
        return [one for one, _ in ready]

    def _sample_rows(self, work: Work) -> list[SampleRow]:
        """Return the sampling input for the row of ``work`` that samples and for those of its proposals.

        Each is as if all proposals before it were right. Behind a token that its grammar does not allow there is none.
        """
        grammar, proposed = work.request.grammar, work.proposed
        if grammar is None:
            return [self._sample_row(work, None, proposed[:right]) for right in range(len(proposed) + 1)]
        masks = [grammar.next_tokens(), *(grammar.tokens_ahead() if proposed else ())]
        return [self._sample_row(work, mask, proposed[:right]) for right, mask in enumerate(masks)]

    def _sample_row(self, work: Work, following: NextTokens | None, right: tuple[int, ...] = ()) -> SampleRow:
        """Return the sampling input of one row; ``following`` masks the tokens behind the request's and ``right``."""
        request = work.request
        position = len(request.answer.tokens) + len(right)
        if not work.is_chunk:
            position += work.start - request.computed  # Tokens that the host has not read yet.
        forbid = forbidden_ids(request.sampling, position, self._runner.eos_token_ids)
        allowed, fault = None, ""
        if following is not None:
            allowed, fault = without(following.words, forbid) if forbid else following.words, following.fault
            forbid = ()
        output: Sequence[int] = request.answer.tokens
        if right and is_penalised(request.sampling):
            output = [*output, *right]
        return SampleRow(
            params=request.sampling,
            output_position=position,
            prompt_ids=request.prompt_ids,
            output_ids=output,
            forbid=forbid,
            allowed=allowed,
            fault=fault,
        )


def _key(work: Work) -> Key:
    return work.request.request_id, work.request.attempt


def _must_hold(work: Work) -> bool:
    """Return whether the token of a chunk has to wait for its grammar.

    Later masks are awaited, which takes no longer than a step.
    """
    grammar = work.request.grammar
    return work.is_chunk and grammar is not None and not grammar.is_ready


def _segments(work: Work, start: int, slot: int) -> list[Segment]:
    """Return the segments of ``work`` from token ``start`` on, whose states are in ``slot``.

    Rows of proposals are segments of their own: the last bits of a row depend on its kernel, and single rows have that
    of decoding.
    """
    pages, adapter = work.request.pages, work.request.adapter
    if not work.proposed:
        return [Segment(work.end - start, start, pages, running=slot, adapter=adapter)]
    return [Segment(1, position, pages, adapter=adapter) for position in range(work.start, work.end)]


def _sampled_rows(work: Work) -> range:
    """Return the rows of ``work``, counted from its first, from whose logits a token is chosen."""
    return range(work.rows - 1 - len(work.proposed), work.rows) if work.samples else range(0)


def _accepted(proposed: Sequence[int], drawn: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """Return the tokens of ``drawn`` up to and including the first that differs from the one proposed.

    Those behind it were chosen from text that was not accepted.
    """
    right = itertools.takewhile(lambda pair: pair[0] == pair[1].token, zip(proposed, drawn, strict=False))
    return tuple(drawn[: sum(1 for _ in right) + 1])


def _is_ordinary(work: Work) -> bool:
    """Return whether the work must be computed in the ordinary order, whatever tokens its request chooses."""
    request = work.request
    return bool(work.is_chunk or request.grammar or request.sparse or request.adapter)


def _prompt_rows(work: Work) -> range:
    """Return the rows of ``work`` that predict a token of the caller's prompt, if their logprobs are wanted."""
    if not work.is_chunk or not work.request.wants_prompt_logprobs:
        return range(0)
    return range(max(0, min(work.end, work.request.prompt_tokens - 1) - work.start))


def _score(work: Work, logits: torch.Tensor) -> dict[int, TokenLogprob]:
    """Return logprobs of the prompt tokens after the first rows of ``work``, by prompt position."""
    request = work.request
    first = work.start + 1
    tokens = request.tokens[first : first + len(logits)]
    scored = prompt_logprobs(logits, tokens, request.sampling.prompt_logprobs or 0)
    return dict(enumerate(scored, first))
