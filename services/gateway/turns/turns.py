"""Keep answers' ids from one turn of a conversation to the next.

A prompt is made in two steps: :meth:`Turns.open` finds the places of earlier answers and their known ids, and
:meth:`Turns.tokens` splices the ids. Between them :meth:`Turns.look_up` asks the cell's bucket for places unknown to
this gateway. :meth:`Turns.ended` takes in a new answer's ids. Only an answer whose ids the tokenizer would not
reproduce goes to the bucket: the others need no memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from services.gateway.known_texts.room import Room
from services.gateway.pending import Generation
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns import measures
from services.gateway.turns.answer_store import AnswerStore
from services.gateway.turns.front_hash import HashedTexts
from services.gateway.turns.memory import MOST_ALTERNATIVES, Alternatives, AnswerMemory, Said
from services.gateway.turns.places import Entry, Place, entry, places
from services.gateway.turns.spliced_texts import SplicedTexts, keep_front
from services.gateway.turns.splicing import NO_FRONT, Fate, Spliced, is_whole, splice
from services.gateway.turns.template_shape import TemplateShape
from shared import logs
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import SamplingParams
from shared.packed_tokens import TOKEN_BYTES, PackedTokens

MOST_WAITING = 1_024
"""Limit on answers that wait to be compared with the tokenizer's ids; further ones are not shared."""

MOST_LOOKUPS = 256
"""Limit on answers of one conversation that are looked up, the earliest first: KV behind a lost one is lost with it."""

SHORT_TOKENS = 2_000
"""A longer answer is decoded in a thread, and so is remembered shortly after its end."""

TAIL_TOKENS = 512
"""Limit on tokens from a prompt's last special token to its end; beyond it, the answer is stored without comparing."""

_log = logs.get_logger("gateway.turns")


@dataclass(slots=True)
class OpenPrompt:
    """A rendered conversation before tokenisation. ``unknown`` answers are to be looked up in the bucket."""

    text: str
    shape: TemplateShape
    namespace: str
    places: list[Place]
    said: dict[str, Alternatives]
    unknown: list[Entry] = field(default_factory=list)
    heard: dict[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of the next answer, None where it is not known, and the fates of the earlier ones' ids."""

    namespace: str
    closing: str
    place: Place | None
    fates: tuple[Fate, ...] = ()


@dataclass(slots=True)
class _Job:
    """An answer to share; ``said`` is None until it is remembered. ``sampling`` says what its client was shown."""

    memory: AnswerMemory
    turn: Turn
    place: Place
    prompt: bytes
    sampling: SamplingParams
    packed: bytes
    said: Said | None = None


class Turns:
    """The ids of one gateway's answers.

    Without ``memory`` nothing is remembered, without ``store`` nothing is shared.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        memory: AnswerMemory | None,
        store: AnswerStore | None,
        texts: HashedTexts | None = None,
        fronts: SplicedTexts | None = None,
    ) -> None:
        """Without ``texts``, conversations are hashed from their beginning; without ``fronts``, spliced from there."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._fronts = fronts
        self._memory = memory if tokenizer.can_splice else None
        self._store = store
        self._waiting: deque[_Job] = deque()
        self._event = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def fault(self) -> str:
        """Why answers are not shared now, although configured; "" while they are."""
        return self._store.fault if self._store is not None else ""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use."""
        return self._memory.nbytes if self._memory is not None else 0

    def open(self, text: str, shape: TemplateShape, namespace: str, answers: int) -> OpenPrompt:
        """Find the places of ``answers`` earlier answers and their known ids. Safe in any thread."""
        if self._memory is None or not namespace:
            return OpenPrompt(text, shape, namespace, [], {})
        found = places(text, shape.opening, namespace, answers, self._texts)
        earlier = [place for place in found if place.offset < len(text)]
        said = self._memory.recall(place.name for place in earlier)
        opened = OpenPrompt(text, shape, namespace, found, said)
        if self._store is not None and self._store.is_open:
            opened.unknown = self._unknown(opened, earlier, self._memory)
        return opened

    @staticmethod
    def _unknown(opened: OpenPrompt, earlier: Sequence[Place], memory: AnswerMemory) -> list[Entry]:
        """Return the answers to look up: none where the text that ends an answer is unknown."""
        text, closing = opened.text, opened.shape.closing
        found: list[Entry] = []
        for place in earlier if closing else ():
            if len(found) == MOST_LOOKUPS:
                break
            if any(is_whole(said, text, place.offset, closing) for said in opened.said.get(place.name, ())):
                continue
            end = text.find(closing, place.offset)
            shown = entry(place, text[place.offset : end if end >= 0 else len(text)], "")
            if not memory.is_absent(shown.name):
                found.append(shown)
        return found

    async def look_up(self, opened: OpenPrompt) -> None:
        """Read the unknown answers from the bucket, within the configured time."""
        if self._store is not None:
            opened.heard = await self._store.read(opened.unknown)

    def tokens(
        self, opened: OpenPrompt, most: int, *, known_in: str | None = None, room: Room | None = None
    ) -> Spliced:
        """Return the prompt's ids; otherwise as ``Tokenizer.packed``. Safe in any thread.

        Raises ContextTooLong, and with ``room`` TooMuchNewText.
        """
        encode = partial(self._tokenizer.encode_rendered, most=most, known_in=known_in, room=room)
        if self._memory is None:
            return Spliced(encode(opened.text), ())
        for asked in opened.unknown:
            packed = opened.heard.get(asked.name)
            if packed is not None:
                self._memory.remember(asked.place.name, self._said(packed))
            elif asked.name in opened.heard:
                self._memory.note_absent(asked.name)
        if opened.heard:
            opened.said = self._memory.recall(place.name for place in opened.places)
        fronts = self._fronts if known_in is not None and opened.namespace else None
        found = fronts.nearest(opened.namespace, opened.text) if fronts is not None else None
        spliced = splice(
            opened.text,
            opened.places,
            opened.said,
            opened.shape.closing,
            encode,
            self._tokenizer.rendered_text,
            (found[0].value, found[1]) if found is not None else (NO_FRONT, 0),
        )
        if fronts is not None:
            keep_front(fronts, opened.namespace, opened.text, spliced.front, found)
        return self._checked(opened.text, spliced, most, encode)

    def turn(self, opened: OpenPrompt, spliced: Spliced, latest: str | None) -> Turn:
        """Return the turn, and count the fate of the latest answer.

        The caller sent that answer as ``latest``; None for no answer.
        """
        fates = spliced.fates
        if self._memory is not None and opened.namespace and latest is not None:
            fate = fates[-1] if fates else Fate.UNKNOWN
            stood_at = self._memory.stood_at(_mark(opened.namespace, latest))
            if fate is Fate.UNKNOWN and stood_at and all(stood_at != place.name for place in opened.places):
                fate = Fate.MOVED
                fates = (*fates[:-1], fate)
            measures.FATES[fate].inc()
        last = opened.places[-1] if opened.places else None
        here = last if last is not None and last.offset == len(opened.text) else None
        return Turn(opened.namespace, opened.shape.closing, here, fates)

    def ended(self, turn: Turn, generation: Generation) -> None:
        """Remember the answers of a generation that is over, also of one that was broken off.

        Conversations may continue these answers.
        """
        memory, place = self._memory, turn.place
        if memory is None or place is None:
            return
        for choice in generation.choices[-MOST_ALTERNATIVES:]:
            tokens = self._words(choice.assembly.tokens)
            # Not for a caller who turned writing off, and not behind a prefix that was loaded in part.
            if not tokens or not choice.request.cache.write or choice.assembly.lossy:
                continue
            job = _Job(memory, turn, place, choice.request.prompt, choice.request.sampling, pack_int32(tokens))
            if len(tokens) <= SHORT_TOKENS:
                job.said = self._remembered(job)
                if self._store is None or not turn.closing or job.said.packed != job.packed:
                    continue
            if len(self._waiting) >= MOST_WAITING:
                measures.ANSWERS.labels("dropped").inc()
                continue
            self._waiting.append(job)
            self._idle.clear()
            self._event.set()

    async def run(self) -> None:
        """Share the answers that ``ended`` queued, for ever."""
        while True:
            await self._event.wait()
            if not self._waiting:
                self._event.clear()
                self._idle.set()
                continue
            await self._share(self._waiting.popleft())

    async def drain(self, timeout_s: float) -> None:
        """Wait until all queued answers are shared, or ``timeout_s`` has passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            measures.ANSWERS.labels("dropped").inc(len(self._waiting))

    async def _share(self, job: _Job) -> None:
        try:
            is_usual = await self._tokenizer.run(lambda: self._is_usual(job), len(job.packed))
            if is_usual:
                measures.ANSWERS.labels("usual").inc()
            elif self._store is not None and job.said is not None and job.said.packed == job.packed:
                # Under the text that the client was shown, which a later turn contains.
                await self._store.write(entry(job.place, self._shown(job), job.turn.closing), job.packed)
        except Exception as error:
            # An answer that is not shared costs little; a gateway that ends because of it costs all its streams.
            measures.ANSWERS.labels("failed").inc()
            _log.exception("answer_not_shared", kind=type(error).__name__)

    def _remembered(self, job: _Job) -> Said:
        said = job.memory.remember(job.place.name, self._said(job.packed))
        job.memory.mark(_mark(job.turn.namespace, said.text), job.place.name)
        return said

    def _is_usual(self, job: _Job) -> bool:
        """Return whether the tokenizer reproduces the answer's ids.

        The answer stands between the prompt's end and the text behind an answer.
        """
        tokenizer = self._tokenizer
        said = job.said = job.said or self._remembered(job)
        if self._shown(job) != said.text:
            return False
        prompt = unpack_int32(job.prompt[-TAIL_TOKENS * TOKEN_BYTES :])
        start = next(
            (place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in tokenizer.added_ids), len(prompt)
        )
        if start == len(prompt):
            return False
        expected = prompt[start:] + unpack_int32(job.packed)
        text = tokenizer.decode_exactly(prompt[start:]) + said.text + job.turn.closing
        return tokenizer.encode_rendered(text)[: len(expected)] == expected

    def _shown(self, job: _Job) -> str:
        """Return an answer's text without the special tokens that its worker leaves out."""
        tokens, hidden = unpack_int32(job.packed), self._tokenizer.special_ids
        if job.sampling.skip_special_tokens and not hidden.isdisjoint(tokens):
            hidden = hidden.difference(job.sampling.shown_special_tokens)
            tokens = [token for token in tokens if token not in hidden]
        return self._tokenizer.rendered_text(tokens)

    def _words(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return an answer without the special tokens at its end: the template writes its own."""
        end = len(tokens)
        while end and tokens[end - 1] in self._tokenizer.special_ids:
            end -= 1
        return tokens[:end]

    def _said(self, packed: bytes) -> Said:
        return Said(packed, self._tokenizer.rendered_text(unpack_int32(packed)))

    def _checked(self, text: str, spliced: Spliced, most: int, encode: Callable[[str], PackedTokens]) -> Spliced:
        """Return the spliced ids if they decode to the text and are not too many, else the tokenizer's."""
        is_long = 0 < most <= len(spliced.tokens)
        if not any(fate is not Fate.UNKNOWN for fate in spliced.fates) or (
            self._tokenizer.joins_exactly and not is_long
        ):
            return spliced
        usual = encode(text)
        decode = self._tokenizer.decode_exactly
        if decode(spliced.tokens) == decode(usual) and not (is_long and len(usual) < len(spliced.tokens)):
            return spliced
        return Spliced(usual, (Fate.REFUSED,) * len(spliced.fates))


def _mark(namespace: str, text: str) -> bytes:
    digest = hashlib.blake2b(namespace.encode(), digest_size=16, person=b"tc-said-1")
    digest.update(text.strip().encode("utf-8", "surrogatepass"))
    return digest.digest()
