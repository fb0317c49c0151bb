"""The API that a server takes, found by trying, so that one command line measures any server.

Prompts of token ids through /v1/completions are best, since lengths and shared prefixes are exact. Else prompts are
texts of approximate length: the number of words that the server counts as a token is measured first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from shared.errors import InvalidRequest, Unavailable
from shared.undecodable import UNDECODABLE
from thermocline.client import RequestError
from thermocline.load.clock import Clock
from thermocline.load.exchange import Refused, exchange
from thermocline.load.http_client import OK, Http
from thermocline.load.prompts import PromptMaker
from thermocline.load.reply import Reply
from thermocline.simulate.tokens import Span

Api = Literal["tokens", "text", "chat"]
APIS: tuple[Api, ...] = get_args(Api)
PATHS: dict[Api, str] = {"tokens": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}

# Byte-level vocabularies put special tokens first, most others last: prompts avoid both.
_FIRST_ORDINARY_TOKEN = 8
_USUAL_VOCABULARY = range(1000, 31_000)
_PROBE_TOKENS = 16
_TOO_MANY_REQUESTS = 429
_SHORT_WORDS, _LONG_WORDS = 32, 160
_EXTENSIONS = {"ignore_eos": True, "return_token_ids": True}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One server's dialect. With ``is_extended`` it takes ``ignore_eos``, so answers have the requested length.

    With ``returns_tokens`` it returns an answer's token ids. ``max_context`` is None where the server does not say.
    """

    model: str
    api: Api
    is_extended: bool
    returns_tokens: bool
    words_per_token: float
    vocabulary_first: int
    vocabulary_end: int
    max_context: int | None

    @property
    def path(self) -> str:
        """Path of the endpoint that takes such prompts."""
        return PATHS[self.api]

    def body(self, prompt: Any, max_tokens: int) -> bytes:
        """Return the JSON of one request; ``prompt`` is token ids, a text or messages, depending on the API."""
        return msgspec.json.encode(_body(self.model, self.api, prompt, max_tokens, is_extended=self.is_extended))


def _body(model: str, api: Api, prompt: Any, max_tokens: int, *, is_extended: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages" if api == "chat" else "prompt": prompt}
    body |= {"max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return body | _EXTENSIONS if is_extended else body


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def find_dialect(
    http: Http, clock: Clock, *, model: str | None, api: Api | None, has_turns: bool, timeout_s: float
) -> Dialect:
    """Probe the server for the best API. With ``has_turns`` prompts repeat answers, so tokens need answers' ids.

    Raises Unavailable when it cannot be reached or has no such API, InvalidRequest when it refuses the requested
    ``model`` or ``api``, or the key.
    """
    card = await _card(http, model, timeout_s)
    vocabulary = range(_FIRST_ORDINARY_TOKEN, card.vocab_size) if card.vocab_size else _USUAL_VOCABULARY
    if len(vocabulary) < 1:
        raise Unavailable(f"the server says that {card.id} has {card.vocab_size} tokens")
    prober = _Prober(http, clock, card.id, vocabulary, timeout_s)
    for candidate in [api] if api else APIS:
        for is_extended in (True, False):
            reply = await prober.try_out(candidate, is_extended=is_extended)
            if reply is None:
                continue
            returns_tokens = bool(reply.said.token_ids)
            if candidate == "tokens" and has_turns and not returns_tokens and api is None:
                break
            return Dialect(
                model=card.id,
                api=candidate,
                is_extended=is_extended,
                returns_tokens=returns_tokens,
                words_per_token=1.0 if candidate == "tokens" else await prober.words_per_token(candidate, is_extended),
                vocabulary_first=vocabulary.start,
                vocabulary_end=vocabulary.stop,
                max_context=card.max_model_len,
            )
    raise InvalidRequest(f"the server refuses {f'--api {api}' if api else 'every kind of request'}: {prober.refusal}")


async def _card(http: Http, model: str | None, timeout_s: float) -> _Card:
    """Return the entry of the model in /v1/models, or a bare one for a ``model`` that is not listed."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await http.send("GET", "/v1/models", b"", None)
        if response.status in (401, 403):
            raise InvalidRequest(f"the server wants another API key (status {response.status})")
        if response.status != OK:
            raise Unavailable(f"the server answers GET /v1/models with status {response.status}")
        cards = msgspec.json.decode(response.body, type=_Cards).data
    except (RequestError, TimeoutError) as error:
        raise Unavailable(f"the server does not answer: {str(error) or type(error).__name__}") from error
    except UNDECODABLE as error:
        raise Unavailable(f"the server's answer at /v1/models is not OpenAI's list of models: {error}") from error
    if model is not None:
        return next((card for card in cards if card.id == model), _Card(model))
    if not cards:
        raise Unavailable("the server serves no model")
    return cards[0]


class _Prober:
    def __init__(self, http: Http, clock: Clock, model: str, vocabulary: range, timeout_s: float) -> None:
        self.refusal = ""
        self._http = http
        self._clock = clock
        self._model = model
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s

    async def try_out(self, api: Api, *, is_extended: bool) -> Reply | None:
        """Send a small request; None when the server refuses it as malformed. Raises Unavailable, InvalidRequest."""
        ends = [self._vocabulary.start, self._vocabulary.stop - 1]
        ids = (ends * _PROBE_TOKENS)[:_PROBE_TOKENS]
        return await self._ask(api, ids if api == "tokens" else self._prompt(api, _SHORT_WORDS), is_extended)

    async def words_per_token(self, api: Api, is_extended: bool) -> float:
        """Return words per token, measured by two lengths so that a template's tokens cancel; 1 without usage."""
        counts = []
        for words in (_SHORT_WORDS, _LONG_WORDS):
            reply = await self._ask(api, self._prompt(api, words), is_extended)
            counts.append(reply.prompt_tokens if reply else 0)
        return (_LONG_WORDS - _SHORT_WORDS) / (counts[1] - counts[0]) if counts[1] > counts[0] > 0 else 1.0

    def _prompt(self, api: Api, words: int) -> str | Sequence[dict[str, str]]:
        maker = PromptMaker(0, vocabulary=self._vocabulary, words_per_token=1.0, length_scale=1.0)
        return maker.messages([Span(0, words)], {}) if api == "chat" else maker.text([Span(0, words)], {})

    async def _ask(self, api: Api, prompt: Any, is_extended: bool) -> Reply | None:
        reply = Reply(0, self._clock.now_s(), self._clock.now_s())
        body = msgspec.json.encode(_body(self._model, api, prompt, 1, is_extended=is_extended))
        try:
            await exchange(self._http, PATHS[api], body, reply, self._clock, self._timeout_s)
        except Refused as refused:
            if refused.status in (401, 403):
                raise InvalidRequest(f"the server wants another API key: {refused}") from refused
            if refused.status >= 500 or refused.status == _TOO_MANY_REQUESTS:
                raise Unavailable(f"the server cannot serve now: {refused}") from refused
            self.refusal = str(refused)
            return None
        except RequestError as error:
            raise Unavailable(f"the first request failed: {error}") from error
        return reply
