"""Chunks that are filled in are the bytes of chunks that are encoded whole."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.assembly import Delta
from services.gateway.pending import Choice
from services.gateway.views.answer import Wanted
from services.gateway.views.chat_view import ChatView
from services.gateway.views.chunk_template import MARK, TextTemplate
from services.gateway.views.completion_view import CompletionView
from tests.unit.gateway.test_views import HEAD, TEXTS, generation


class Whole(CompletionView):
    """Encodes every chunk whole."""

    def _text_chunk(self, position: int, text: str) -> bytes:
        body = self._choice(self._generation.choices[position], Delta(text=text, tokens=[1]))
        return self._response([body])


@given(st.text())
def test_any_text_is_encoded_as_in_a_whole_chunk(text: str) -> None:
    """Quotes, line breaks, controls, and the mark itself."""
    template = TextTemplate(msgspec.json.encode({"before": 1, "text": MARK, "after": [None]}))

    assert template.fill(text) == msgspec.json.encode({"before": 1, "text": text, "after": [None]})


def test_later_chunks_of_a_completion_are_what_they_were() -> None:
    """With and without a place for usage; the first and the last chunk of a choice are made whole."""
    for wanted in (Wanted(), Wanted(usage_chunk=True)):
        made = generation(n=2)
        views = [kind(made, HEAD, wanted, TEXTS, lambda: 0) for kind in (CompletionView, Whole)]
        deltas = [Delta(text=text, tokens=[1]) for text in ("a", "b\n\0", "", "ü")] + [Delta(text="z", finish="stop")]
        chunks = [[view.chunk(choice, delta) for choice in made.choices for delta in deltas] for view in views]

        assert chunks[0] == chunks[1]
        assert [chunk is None for chunk in chunks[0]] == [False, False, True, False, False] * 2


def test_later_chunks_of_a_chat_have_their_text_alone() -> None:
    """As the object that a client decodes."""
    made = generation()
    view = ChatView(made, HEAD, Wanted(), TEXTS, lambda: 0)
    (opening,) = view.opening()

    chunk = view.chunk(made.choices[0], Delta(text='say "hi"\n', tokens=[1, 2]))

    assert chunk is not None
    expected = msgspec.json.decode(opening)
    expected["choices"][0]["delta"] = {"content": 'say "hi"\n'}
    assert msgspec.json.decode(chunk) == expected


def test_what_belongs_to_tokens_keeps_chunks_whole() -> None:
    """Ids, for one, are of each chunk."""
    made = generation()
    view = CompletionView(made, HEAD, Wanted(token_ids=True), TEXTS, lambda: 0)
    choice: Choice = made.choices[0]
    view.chunk(choice, Delta(text="a", tokens=[5]))

    chunk = view.chunk(choice, Delta(text="b", tokens=[6]))

    assert chunk is not None
    assert msgspec.json.decode(chunk)["choices"][0]["token_ids"] == [6]
