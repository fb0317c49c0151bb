"""Compact forms say what the messages say, in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.codec import encode
from shared.compact_messages import (
    chunks_saved,
    compact_admission,
    compact_request,
    compact_save,
    whole_admission,
    whole_request,
    whole_save,
)
from shared.errors import CodecError
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32
from shared.messages.requests import PromptBase, SamplingParams, SubmitRequest
from shared.messages.storage_events import ChunksSaved
from shared.messages.storage_plans import SaveChunks
from shared.messages.worker_plans import AdmitRequest, TextBase

SAMPLING = SamplingParams(max_tokens=1)
NAMESPACE = "ab" * 16
PAGE = 16
NUMBERS = st.lists(st.integers(-1, 300_000), max_size=40)


def request(tokens: list[int], base_tokens: int = 0) -> SubmitRequest:
    told = pack_int32(tokens)
    if not base_tokens:
        return SubmitRequest(request_id="r", gateway_id="g", namespace=NAMESPACE, prompt=told, sampling=SAMPLING)
    base = PromptBase(digest=b"d" * 16, tokens=base_tokens)
    return SubmitRequest(
        request_id="r", gateway_id="g", namespace=NAMESPACE, prompt=b"", sampling=SAMPLING, base=base, tail=told
    )


def admission(tokens: list[int], pages: list[int], **told: Any) -> AdmitRequest:
    return AdmitRequest(
        request_id="r", attempt=1, gateway_id="g", tokens=pack_int32(tokens), prompt_tokens=1, sampling=SAMPLING,
        pages=pack_int32(pages), **told,
    )  # fmt: skip


def save(pages: int, *, depth: int = 0, host: int = -1) -> SaveChunks:
    tokens = pack_int32(range(pages * PAGE))
    parent = b"p" * 16 if depth else chain_root(NAMESPACE)
    return SaveChunks(
        save_id=1,
        namespace=NAMESPACE,
        depth=depth,
        tokens=tokens,
        parent=parent,
        identities=chain_pages(parent, tokens, PAGE * 4),
        host_pages=pack_int32([host + (host >= 0) * place for place in range(pages)]),
        device_pages=pack_int32([-1] * pages if host >= 0 else range(40, 40 + pages)),
        worker_id="" if host >= 0 else "w",
        value=2.5,
    )


@given(NUMBERS, st.integers(0, 1))
def test_a_request_is_whole_again(tokens: list[int], blocks: int) -> None:
    """With a base or without one, and it says the same number of tokens meanwhile."""
    told = request(tokens, 1_024 * blocks)

    compact = compact_request(told)

    assert whole_request(compact) == told
    assert compact.prompt_tokens == told.prompt_tokens
    assert len(encode(compact)) <= len(encode(told))


@given(NUMBERS, NUMBERS)
def test_an_admission_is_whole_again(tokens: list[int], pages: list[int]) -> None:
    """With what follows a base, and it says the same number of tokens meanwhile."""
    told = admission(tokens, pages, base=TextBase(text=3, tokens=9, pages=1))

    compact = compact_admission(told)

    assert whole_admission(compact) == told
    assert compact.token_count == told.token_count
    assert len(encode(compact)) <= len(encode(told))


@pytest.mark.parametrize("order", [save(4), save(8, depth=64), save(64, depth=128, host=3), save(0)])
def test_a_save_is_whole_again(order: SaveChunks) -> None:
    """Identities are those of the tokens, from the page above on."""
    assert whole_save(compact_save(order), PAGE) == order


def test_a_turn_of_3500_tokens_takes_half() -> None:
    """A prompt's end, its admission and the save of it, of a vocabulary of 128,256."""
    tokens = [number * 7919 % 128_256 for number in range(3_584)]
    pages = list(range(5_000, 5_228))
    told = request(tokens, 1_024), admission(tokens, pages)

    compact = compact_request(told[0]), compact_admission(told[1])

    assert sum(len(encode(message)) for message in told) > 29_000
    assert sum(len(encode(message)) for message in compact) < 16_000
    assert len(encode(save(224))) > 19_500
    assert len(encode(compact_save(save(224)))) < 7_500


def test_what_cannot_be_read_is_refused() -> None:
    """By the error of the codec, whichever field it is."""
    with pytest.raises(CodecError):
        whole_request(replace(request([]), compact=b"\5"))
    with pytest.raises(CodecError, match="says the same"):
        whole_request(replace(request([7]), compact=compact_request(request([7] * 20)).compact))
    with pytest.raises(CodecError):
        whole_admission(admission([], [], compact=b"\5"))
    with pytest.raises(CodecError):
        whole_admission(admission([], [], page_runs=b"\5"))
    for change in ({"tokens": b"\5"}, {"parent": b"\5"}, {"host_runs": b"\5"}, {"device_runs": b"\5"}):
        with pytest.raises(CodecError):
            whole_save(replace(compact_save(save(4)), **change), PAGE)


def test_an_answer_names_chunks_or_all() -> None:
    """Whoever ordered them knows their names."""
    some = ChunksSaved(storage_id="s", incarnation="i", save_id=1, chunks=b"a" * 16)
    everything = ChunksSaved(storage_id="s", incarnation="i", save_id=1, is_all=True)

    assert chunks_saved(some, b"b" * 32) == b"a" * 16
    assert chunks_saved(everything, b"b" * 32) == b"b" * 32
