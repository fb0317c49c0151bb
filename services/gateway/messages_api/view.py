"""The answer to a request of the Messages API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway import sse
from services.gateway.assembly import Delta
from services.gateway.cache_hints import TTL_MS
from services.gateway.messages_api.answers import (
    UNFINISHED,
    BlockDelta,
    BlockStart,
    BlockStop,
    CacheCreation,
    InputJsonDelta,
    MessageDelta,
    MessagesOutputDetails,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputBlock,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from services.gateway.messages_api.errors import messages_error_body
from services.gateway.messages_api.said import SaidArguments
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.pending import Choice, Generation
from services.gateway.replies.blocks import Block, BlockList, Change
from services.gateway.views.usage import usage_report
from shared.errors import ThermoclineError
from shared.messages.requests import Lease

SIGNATURE = "unsigned"
"""Signature of blocks of reasoning: clients send such a block back only with one."""


def _event(event: msgspec.Struct) -> bytes:
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return sse.named_event(name, msgspec.json.encode(event))


FRAMING = sse.Framing(event=bytes, keepalive=_event(Ping()), end=b"")


class MessagesView:
    """The view of an answer with one choice, the only kind of this API. Implements ``AnswerView``."""

    framing = FRAMING
    wants_explanation = False

    def __init__(
        self,
        generation: Generation,
        answer_id: str,
        model: str,
        *,
        max_tokens: int,
        hides_thinking: bool = False,
        said: SaidArguments | None = None,
    ) -> None:
        """``max_tokens`` is the number asked for, for which the context may not have had room; 0 hides the one token.

        Blocks of reasoning are empty if ``hides_thinking``. ``said`` remembers the texts of calls' arguments.
        """
        self._generation = generation
        self._id = answer_id
        self._model = model
        self._hides_output = max_tokens == 0
        self._is_clipped = generation.choices[0].request.sampling.max_tokens < max_tokens
        self._hides_thinking = hides_thinking
        self._said = said
        self._list = BlockList()
        self._stop: StopDelta | None = None
        self.explanation: Explanation | None = None

    def prepare(self) -> None:
        """Make nothing: the first events have the time and what is known of the prompt."""

    def opening(self) -> list[bytes]:
        """Return ``message_start`` with the prompt's usage so far, and a ping."""
        return [_event(MessageStart(message=self._response([], None))), _event(Ping())]

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return all events of the new parts; those of the end come with ``closing``."""
        data = b"".join(map(self._events, self._take(choice, delta)))
        return data or None

    def closing(self) -> list[bytes]:
        """Return ``message_delta`` with the reason for the end and the final usage, and ``message_stop``."""
        assert self._stop is not None
        usage = messages_usage(self._generation, count_output=not self._hides_output)
        return [_event(MessageDelta(delta=self._stop, usage=usage)), _event(MessageStop())]

    def failed(self, error: ThermoclineError) -> bytes:
        """Return the event ``error``."""
        return sse.named_event("error", messages_error_body(error))

    def whole(self) -> bytes:
        """Return the answer as one JSON body, after its end."""
        self._finish()
        blocks = [self._written(block, hides_thinking=self._hides_thinking) for block in self._list.blocks]
        return msgspec.json.encode(self._response(blocks, self._stop))

    def reply(self) -> list[OutputBlock]:
        """Return the answer's blocks, hidden reasoning included, after its end."""
        self._finish()
        return [self._written(block, hides_thinking=False) for block in self._list.blocks]

    def _finish(self) -> None:
        choice = self._generation.choices[0]
        if self._stop is None:  # It is not streamed.
            self._take(choice, choice.assembly.take())

    def _take(self, choice: Choice, delta: Delta) -> list[Change]:
        if self._hides_output:
            if delta.finish is not None:
                self._stop = StopDelta(stop_reason="max_tokens", stop_sequence=None)
            return []
        changes = self._list.take(choice.reply.read(delta))
        if delta.finish is not None:
            changes += self._list.end()
            self._stop = self._stopped(delta)
            for block in self._list.blocks:
                if block.kind == "call" and self._said is not None:
                    self._said.note(block.call_id, block.text)
        return changes

    def _stopped(self, delta: Delta) -> StopDelta:
        reason: StopReason = "end_turn"
        sequence = None
        if delta.finish == "length":
            reason = "model_context_window_exceeded" if self._is_clipped else "max_tokens"
        elif isinstance(delta.stop_match, str):  # It may have cut off a call, which must not be run then.
            reason, sequence = "stop_sequence", delta.stop_match
        elif self._list.has_calls:
            reason = "tool_use"
        return StopDelta(stop_reason=reason, stop_sequence=sequence)

    def _events(self, change: Change) -> bytes:
        block = change.block
        if change.kind == "began":
            return _event(BlockStart(index=block.index, content_block=_begun(block)))
        if change.kind == "ended":
            stop = _event(BlockStop(index=block.index))
            if block.kind == "reasoning":
                return _event(BlockDelta(index=block.index, delta=SignatureDelta(signature=SIGNATURE))) + stop
            return stop
        if block.kind == "text":
            return _event(BlockDelta(index=block.index, delta=TextDelta(text=change.text)))
        if block.kind == "call":
            return _event(BlockDelta(index=block.index, delta=InputJsonDelta(partial_json=change.text)))
        if self._hides_thinking:
            return b""
        return _event(BlockDelta(index=block.index, delta=ThinkingDelta(thinking=change.text)))

    def _written(self, block: Block, *, hides_thinking: bool) -> OutputBlock:
        if block.kind == "text":
            return TextBlock(text=block.text)
        if block.kind == "reasoning":
            return ThinkingBlock(thinking="" if hides_thinking else block.text, signature=SIGNATURE)
        return ToolUseBlock(id=block.call_id, name=block.name, input=_input(block.text))

    def _response(self, content: list[OutputBlock], stop: StopDelta | None) -> MessagesResponse:
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=messages_usage(self._generation, count_output=not self._hides_output),
        )


def messages_usage(generation: Generation, *, count_output: bool = True) -> MessagesUsage:
    """Return the tokens so far, in Anthropic's parts."""
    report = usage_report(generation, count_output=count_output)
    found = report.prompt_tokens_details
    cached = found.cached_tokens
    created, creation = _created(generation.choices[0].request.cache.leases, cached, found.cache_write_tokens)
    return MessagesUsage(
        input_tokens=report.prompt_tokens - cached - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=cached,
        cache_creation=creation,
        output_tokens=report.completion_tokens,
        output_tokens_details=MessagesOutputDetails(thinking_tokens=generation.choices[0].reply.reasoning_tokens or 0),
    )


def _created(leases: Sequence[Lease], cached: int, written: int) -> tuple[int, CacheCreation]:
    """Return the tokens between the hits and the last breakpoint: all of them, and by the time for which they are kept.

    Tokens behind the last breakpoint are cached as well, and count as input, as at Anthropic.
    """
    created: dict[int, int] = {}
    end = cached
    for lease in sorted(leases, key=lambda lease: lease.tokens):
        if lease.tokens > end:
            created[lease.ttl_ms] = created.get(lease.ttl_ms, 0) + min(lease.tokens, cached + written) - end
            end = min(lease.tokens, cached + written)
    hour = TTL_MS["1h"]
    total = sum(created.values())
    of_an_hour = created.get(hour, 0)
    return total, CacheCreation(ephemeral_1h_input_tokens=of_an_hour, ephemeral_5m_input_tokens=total - of_an_hour)


def _begun(block: Block) -> OutputBlock:
    if block.kind == "text":
        return TextBlock(text="")
    if block.kind == "reasoning":
        return ThinkingBlock(thinking="", signature="")
    return ToolUseBlock(id=block.call_id, name=block.name, input={})


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; others as text, in the one field :data:`UNFINISHED`."""
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {UNFINISHED: arguments}
    return decoded if isinstance(decoded, dict) else {UNFINISHED: arguments}
