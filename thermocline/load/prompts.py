"""Prompts from spans: token ids, a text, or the messages of a chat.

A span's name is a number, and its content depends only on the name and the run's seed: equal names give equal content,
a longer span begins with a shorter one, and another seed shares nothing with this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.random import PCG64, SeedSequence

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, name

_KINDS = name(0, 1)  # Distance between successive names of one kind.

# Short and frequent: nearly every vocabulary has each of them as one token.
WORDS = (  # noqa: SIM905 - a list of strings would be a page long.
    "about after again all also always and another any are around ask back because been before below between big book "
    "both boy but call came can change city close come could country day did does down each early earth eat end "
    "enough even every example eye face family far father feet few find first follow food for found four from girl "
    "give good great group grow had hand hard has have head hear help her here high him his home house how idea into "
    "just keep kind know land large last late learn leave left letter life light like line list little live long look "
    "made make man many may mean men might mile more most mother mountain move much must name near need never"
).split()


@dataclass(frozen=True, slots=True)
class Said:
    """A server's answer, which the next turn of its conversation repeats."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class PromptMaker:
    """The maker of one run's prompts."""

    def __init__(self, seed: int, *, vocabulary: range, words_per_token: float, length_scale: float) -> None:
        """Draw contents by ``seed``: token ids from ``vocabulary``, texts from WORDS.

        ``words_per_token`` is the number of WORDS that the server counts as a token. Lengths of spans are divided by
        ``length_scale``.
        """
        self._seed = seed
        self._vocabulary = vocabulary
        self._words_per_token = words_per_token
        self._length_scale = length_scale

    def scaled(self, tokens: int) -> int:
        """Return a length divided by the run's scale; 1 at least."""
        return max(1, round(tokens / self._length_scale))

    def tokens(self, spans: Iterable[Span], said: Mapping[int, Said]) -> list[int]:
        """Return the token ids of a prompt; spans in ``said`` are the answers' own tokens."""
        ids: list[int] = []
        for span in spans:
            known = said.get(span.name)
            if known is not None:
                ids += known.token_ids
                continue
            drawn = self._drawn(span.name, self.scaled(span.tokens)) % np.uint64(len(self._vocabulary))
            ids += (drawn + np.uint64(self._vocabulary.start)).tolist()
        return ids

    def text(self, spans: Iterable[Span], said: Mapping[int, Said]) -> str:
        """Return a prompt as words; spans in ``said`` are the answers' own texts."""
        return " ".join(self._words(span, said) for span in spans)

    def messages(self, spans: Iterable[Span], said: Mapping[int, Said]) -> list[dict[str, str]]:
        """Return a prompt as a chat: answers are the assistant's messages, all others the user's.

        A system prompt is a part of the first message, because not every model's template knows the role.
        """
        messages: list[dict[str, str]] = []
        for span in spans:
            role = "assistant" if span.name % _KINDS == OUTPUT else "user"
            words = self._words(span, said)
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n\n" + words
            else:
                messages.append({"role": role, "content": words})
        return messages

    def _words(self, span: Span, said: Mapping[int, Said]) -> str:
        known = said.get(span.name)
        if known is not None:
            return known.text
        count = max(1, round(self.scaled(span.tokens) * self._words_per_token))
        return " ".join(WORDS[index] for index in (self._drawn(span.name, count) % np.uint64(len(WORDS))).tolist())

    def _drawn(self, name: int, count: int) -> np.ndarray:
        # NumPy promises stable results for raw draws of a bit generator, but not for its distributions.
        drawn: np.ndarray = PCG64(SeedSequence((self._seed, name))).random_raw(count)
        return drawn
