"""A divergence point in text, for those who may know the cache and for those who may not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.gateway.openai_schema.explanation import Divergence
from services.gateway.prompt_places import Place
from services.gateway.views.divergence import (
    CONTEXT_CHARACTERS,
    divergence_view,
    divergences_view,
    texts_of,
    to_the_page,
)
from shared.messages.base import pack_int32
from shared.messages.explanations import CostlyPoint, DivergencePoint, Divergences

PAGE = 16
SYSTEM = Place("message", 0, "system")
START = "You are the harbour office of a town by the sea, and you answer what sailors ask. The time is now 12:0"


def ids(text: str) -> list[int]:
    """Tokens of a vocabulary of bytes."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(token % 256 for token in tokens).decode(errors="replace")


def a_point(*, cached: str = "4 o'clock.", **changes: object) -> DivergencePoint:
    common = ids(START)
    fields = {
        "kind": "diverged", "position": len(common), "page_start": len(common) // PAGE * PAGE, "page_size": PAGE,
        "before": pack_int32(common), "prompt": pack_int32(ids("5 o'clock.")), "cached": pack_int32(ids(cached)),
        "lost_tokens": 812, "lost_us": 93_100,
    }  # fmt: skip
    return msgspec.convert(fields | changes, DivergencePoint)


def view(point: DivergencePoint, *, prompt_tokens: int = 2000, sees_cache: bool = True) -> Divergence:
    return divergence_view(point, prompt_tokens, SYSTEM, decode, sees_cache=sees_cache)


def test_both_sides_are_shown_with_what_it_cost() -> None:
    """About forty characters before, and as many behind."""
    told = view(a_point())

    assert (told.kind, told.token, told.part, told.message, told.role) == (
        "diverged", len(ids(START)), "message", 0, "system",
    )  # fmt: skip
    assert told.before == START[-CONTEXT_CHARACTERS:]
    assert (told.prompt, told.cached) == ("5 o'clock.", "4 o'clock.")
    assert (told.cause, told.lost_tokens, told.lost_ms) == ("date_or_time", 812, 93.1)


def test_who_may_not_see_the_cache_is_told_of_the_own_prompt() -> None:
    """Of the page, not of the token; no text of the other side, and no count of what both have."""
    told = view(a_point(), sees_cache=False)

    position = len(ids(START)) // PAGE * PAGE
    assert (told.kind, told.token, told.cached, told.lost_tokens, told.lost_ms) == (
        "diverged", position, None, None, None,
    )  # fmt: skip
    assert told.cause == "date_or_time"
    assert told.before is not None
    assert told.prompt is not None
    assert (told.before + told.prompt) in START + "5 o'clock."


def test_nothing_told_to_others_depends_on_tokens_of_the_cache_within_a_page() -> None:
    """Prompts of one text that agree for longer or shorter within the page, or to its end, look the same."""
    text = START + "5 o'clock. " + "Be kind. " * 30
    tokens = ids(text)
    page_start = len(ids(START)) // PAGE * PAGE
    told = set()
    for common in range(PAGE):
        at = page_start + common
        point = DivergencePoint(
            kind="diverged", position=at, page_start=page_start, page_size=PAGE, lost_tokens=common, lost_us=common,
            before=pack_int32(tokens[max(0, at - 64 - PAGE) : at]), prompt=pack_int32(tokens[at : at + 64]),
            cached=pack_int32([common + 300]),
        )  # fmt: skip
        told.add(msgspec.json.encode(view(point, prompt_tokens=len(tokens), sees_cache=False)))

    assert len(told) == 1


def test_in_a_last_page_others_are_not_told_whether_more_agrees() -> None:
    """A single token there could be guessed."""
    right = a_point(kind="continued", cached="", lost_tokens=0, lost_us=0)
    wrong = a_point()
    end = right.page_start + PAGE

    told = [view(point, prompt_tokens=end, sees_cache=False) for point in (right, wrong)]

    assert told[0] == told[1]
    assert told[0].kind == "continued"
    assert view(wrong, prompt_tokens=end).kind == "diverged"


def test_characters_are_shown_whole() -> None:
    """Where both sides share the first bytes of one, or the texts begin or end within one."""
    ours, theirs = ids("ß Ort: 世界 jä")[1:-1], ids("ß Ort: 世畍 nein")[1:]
    at = next(n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    point = DivergencePoint(
        kind="diverged", position=at, before=pack_int32(ours[:at]), prompt=pack_int32(ours[at:]),
        cached=pack_int32(theirs[at:]),
    )  # fmt: skip
    assert decode(ours[:at]).endswith("世\ufffd")

    assert texts_of(point, decode) == (" Ort: 世", "界 j", "畍 nein")


def test_what_has_left_has_no_cause_and_what_goes_on_no_text() -> None:
    """Nothing differs there."""
    gone = view(a_point(kind="evicted", cached=""))
    goes_on = view(a_point(kind="continued", cached="", lost_tokens=0, lost_us=0))
    opted = view(DivergencePoint(kind="opted_out"))

    assert (gone.cause, gone.cached, gone.prompt, gone.lost_tokens) == (None, None, "5 o'clock.", 812)
    assert (goes_on.cause, goes_on.before, goes_on.prompt, goes_on.lost_tokens) == (None, None, None, 0)
    assert (opted.kind, opted.token, opted.lost_tokens) == ("opted_out", None, 0)


def test_eviction_is_told_to_all_alike() -> None:
    """What left is in the parts of the prompt, too, page by page."""
    point = a_point(kind="evicted", cached="")

    assert to_the_page(point, 2000) == point


def test_the_cells_points_have_texts_where_there_is_a_tokenizer() -> None:
    """And otherwise figures alone."""
    costly = CostlyPoint(
        namespace="ab" * 16, point=a_point(), requests=40, lost_tokens=9000, lost_us=1_000_000, error_tokens=5,
        request_id="r-0", at_ns=7 * 10**15,
    )  # fmt: skip
    found = Divergences(since_ns=10**15, points=(costly,))

    (told,) = divergences_view(found, decode).data
    (bare,) = divergences_view(found, None).data

    assert (told.prompt, told.cached, told.cause) == ("5 o'clock.", "4 o'clock.", "date_or_time")
    assert (told.requests, told.lost_tokens, told.lost_ms, told.error_tokens) == (40, 9000, 1000, 5)
    assert (bare.prompt, bare.cause, bare.lost_tokens) == (None, None, 9000)
    assert divergences_view(found, None).since_ms == 10**9
    assert divergences_view(Divergences(), None).since_ms is None
