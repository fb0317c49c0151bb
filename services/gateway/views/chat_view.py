"""The view of a chat's answer. Pure, with time as an argument."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.assembly import Delta
from services.gateway.openai_schema.chat import (
    AnswerDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
)
from services.gateway.openai_schema.usage import UsageReport
from services.gateway.pending import Choice, Generation
from services.gateway.replies.parts import Text
from services.gateway.token_text import TokenTexts
from services.gateway.views.answer import DataEvents, Head, Wanted
from services.gateway.views.chat_reply import answer_delta, answer_message
from services.gateway.views.chunk_template import MARK, TextTemplate
from services.gateway.views.logprobs import chat_logprobs
from services.gateway.views.usage import usage_report
from shared.messages.base import unpack_int32


class ChatView(DataEvents):
    """The view of an answer with any number of choices. Implements ``AnswerView``."""

    def __init__(
        self, generation: Generation, head: Head, wanted: Wanted, texts: TokenTexts, now_ns: Callable[[], int]
    ) -> None:
        """All arguments are those of :class:`DataEvents`."""
        super().__init__(generation, head, wanted, texts, now_ns)
        self._first = True
        self._prepared: list[bytes] | None = None
        self._is_plain = not (wanted.tokens_matter or wanted.prompt_logprobs is not None)

    def prepare(self) -> None:
        """Encode what is the same whatever the tokens are: the chunks with the role, and those of texts around them."""
        if self._is_plain:
            self._prepared = self.opening()
            for choice in self._generation.choices:
                self._template(choice.position)

    def opening(self) -> list[bytes]:
        """Return one chunk per choice with the role, before any content."""
        if self._prepared is not None:
            return self._prepared
        return [
            self._chunk(
                [ChatChunkChoice(index=c.position, delta=AnswerDelta(role="assistant", content=""))],
                count_output=False,  # The first token may have come: the next chunk has it.
            )
            for c in self._generation.choices
        ]

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return the chunk of the new parts.

        Returns None if the delta has neither parts, nor the end, nor tokens or prompt logprobs that the caller asked
        for.
        """
        has_prompt_logprobs = self._wanted.prompt_logprobs is not None and delta.prompt_logprobs is not None
        parts = choice.reply.read(delta)
        has_news = bool(parts) or delta.finish is not None or has_prompt_logprobs
        if not has_news and not (delta.tokens and self._wanted.tokens_matter):
            return None
        if self._is_plain and not self._first and delta.finish is None:
            texts = [part.text for part in parts if isinstance(part, Text)]
            if len(texts) == len(parts):
                return self._text_chunk(choice.position, "".join(texts))
        body = ChatChunkChoice(
            index=choice.position,
            delta=answer_delta(parts) if parts or delta.finish is not None else AnswerDelta(content=""),
            logprobs=self._logprobs(delta),
            finish_reason=choice.reply.finish_reason(delta.finish),
            stop_reason=delta.stop_match if delta.finish is not None else UNSET,
            token_ids=delta.tokens if self._wanted.token_ids else UNSET,
        )
        return self._chunk([body], delta)

    def _text_chunk(self, position: int, text: str) -> bytes:
        """Return a chunk with only text, as most have."""
        return self._template(position).fill(text)

    def _template(self, position: int) -> TextTemplate:
        template = self._templates.get(position)
        if template is None:
            example = ChatChunkChoice(index=position, delta=AnswerDelta(content=MARK))
            template = self._templates[position] = TextTemplate(self._chunk([example]))
        return template

    def closing(self) -> list[bytes]:
        """Return a chunk without choices, if usage, timing or an explanation was asked for."""
        if not self._wanted.last_chunk:
            return []
        return [self._chunk([], is_last=True)]

    def whole(self) -> bytes:
        """Return the response with every choice's message; takes the choices' tokens."""
        choices = []
        prompt_logprobs = None
        for choice in self._generation.choices:
            delta = choice.assembly.take()
            prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
            choices.append(
                ChatChoice(
                    index=choice.position,
                    message=answer_message(choice.reply.read(delta)),
                    logprobs=self._logprobs(delta),
                    finish_reason=choice.reply.finish_reason(delta.finish),
                    stop_reason=delta.stop_match,
                    token_ids=delta.tokens if self._wanted.token_ids else UNSET,
                )
            )
        first = self._generation.choices[0]
        return msgspec.json.encode(
            ChatResponse(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.system_fingerprint,
                choices=choices,
                usage=usage_report(self._generation),
                prompt_token_ids=unpack_int32(first.request.prompt) if self._wanted.token_ids else UNSET,
                prompt_logprobs=self._prompt_logprobs(prompt_logprobs),
                timing=self._timing(is_last=True),
                explanation=self.explanation if self._wanted.explanation else UNSET,
            )
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._wanted.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self._wanted.logprobs, self._texts)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        delta: Delta | None = None,
        *,
        is_last: bool = False,
        count_output: bool = True,
    ) -> bytes:
        wanted, generation = self._wanted, self._generation
        usage: UsageReport | UnsetType | None = UNSET if not wanted.usage_chunk else None
        if wanted.continuous_usage or (is_last and wanted.usage_chunk):
            usage = usage_report(generation, count_output=count_output)
        prompt = generation.choices[0].request.prompt
        chunk = ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            prompt_token_ids=unpack_int32(prompt) if self._first and wanted.token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(delta.prompt_logprobs if delta is not None else None),
            usage=usage,
            timing=self._timing(is_last=is_last),
            explanation=self.explanation if is_last and wanted.explanation else UNSET,
        )
        self._first = False
        return msgspec.json.encode(chunk)
