"""The view of a completion. Pure, with time as an argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.assembly import Delta
from services.gateway.openai_schema.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from services.gateway.openai_schema.usage import UsageReport
from services.gateway.pending import Choice, Generation
from services.gateway.token_text import TokenTexts
from services.gateway.views.answer import DataEvents, Head, Wanted
from services.gateway.views.chunk_template import MARK, TextTemplate
from services.gateway.views.logprobs import TextOffsets, completion_logprobs
from services.gateway.views.usage import usage_report
from shared.messages.base import unpack_int32
from shared.messages.tokens import TokenLogprob


class CompletionView(DataEvents):
    """The view of completions of any number of prompts. Implements ``AnswerView``."""

    def __init__(
        self,
        generation: Generation,
        head: Head,
        wanted: Wanted,
        texts: TokenTexts,
        now_ns: Callable[[], int],
        *,
        echoes: Sequence[str] = (),
        hides_output: bool = False,
        special: Collection[int] = (),
        skips_special: bool = True,
    ) -> None:
        """Repeat the prompts' texts ``echoes``; the first arguments are those of :class:`DataEvents`.

        ``hides_output`` drops the one token that is generated when the caller wanted none (``max_tokens`` 0 with
        ``echo``, which scores a prompt). ``skips_special``: the text of the output lacks its tokens in ``special``.
        """
        super().__init__(generation, head, wanted, texts, now_ns)
        self._echoes = echoes
        self._hides_output = hides_output
        self._offsets = [
            TextOffsets(
                texts,
                special=special,
                echo=echoes[choice.prompt] if echoes else "",
                skips_special=skips_special,
            )
            for choice in generation.choices
        ]
        self._opened = [False] * len(generation.choices)
        self._is_plain = not (wanted.tokens_matter or wanted.prompt_logprobs is not None or hides_output)

    def opening(self) -> list[bytes]:
        """Return no chunks: the first chunk of a choice has its own text."""
        return []

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return the chunk of new text; None if the delta has neither text nor tokens that the caller asked for."""
        is_first = not self._opened[choice.position]
        if self._is_plain and not is_first and delta.finish is None:
            return self._text_chunk(choice.position, delta.text) if delta.text else None
        body = self._choice(choice, delta)
        has_news = bool(body.text) or body.finish_reason is not None or body.prompt_logprobs is not UNSET
        if not has_news and not (delta.tokens and self._wanted.tokens_matter):
            self._opened[choice.position] = not is_first
            return None
        return self._response([body])

    def closing(self) -> list[bytes]:
        """Return a chunk without choices, if usage, timing or an explanation was asked for."""
        if not self._wanted.last_chunk:
            return []
        return [self._response([], is_last=True)]

    def whole(self) -> bytes:
        """Return the response with every choice's text; takes the choices' tokens."""
        choices = [self._choice(choice, choice.assembly.take()) for choice in self._generation.choices]
        return self._response(choices, is_last=True, is_whole=True)

    def _text_chunk(self, position: int, text: str) -> bytes:
        """Return a chunk with only text, as most have."""
        template = self._templates.get(position)
        if template is None:
            example = CompletionChoice(index=position, text=MARK)
            template = self._templates[position] = TextTemplate(self._response([example]))
        return template.fill(text)

    def _choice(self, choice: Choice, delta: Delta) -> CompletionChoice:
        """Return the additions of ``delta``; the first of a choice includes those of its prompt."""
        is_first = not self._opened[choice.position]
        self._opened[choice.position] = True
        text = "" if self._hides_output else delta.text
        tokens = [] if self._hides_output else delta.tokens
        finish = delta.finish
        if self._hides_output and finish is not None:
            finish = "length"
        if is_first and self._echoes:
            text = self._echoes[choice.prompt] + text
        return CompletionChoice(
            index=choice.position,
            text=text,
            logprobs=self._logprobs(choice, delta),
            finish_reason=finish,
            stop_reason=None if self._hides_output else delta.stop_match,
            token_ids=tokens if self._wanted.token_ids else UNSET,
            prompt_token_ids=unpack_int32(choice.request.prompt) if is_first and self._wanted.token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(delta.prompt_logprobs),
        )

    def _logprobs(self, choice: Choice, delta: Delta) -> CompletionLogprobs | None:
        if self._wanted.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = []
        first_token = None
        if self._echoes and delta.prompt_logprobs is not None:
            entries += delta.prompt_logprobs
            first_token = unpack_int32(choice.request.prompt[:4])[0]
        if not self._hides_output:
            entries += delta.logprobs
        offsets = self._offsets[choice.position]
        return completion_logprobs(entries, self._wanted.logprobs, self._texts, offsets, first_token=first_token)

    def _response(self, choices: list[CompletionChoice], *, is_last: bool = False, is_whole: bool = False) -> bytes:
        wanted, generation = self._wanted, self._generation
        usage: UsageReport | UnsetType | None = UNSET if not wanted.usage_chunk else None
        if is_whole or wanted.continuous_usage or (is_last and wanted.usage_chunk):
            usage = usage_report(generation, count_output=not self._hides_output)
        return msgspec.json.encode(
            CompletionResponse(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                system_fingerprint=self._head.system_fingerprint,
                choices=choices,
                usage=usage,
                timing=self._timing(is_last=is_last),
                explanation=self.explanation if is_last and wanted.explanation else UNSET,
            )
        )
