"""Blocks of a prompt have the digests that hashing gives, and those of a known front are not hashed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import known_prompts
from services.gateway.known_prompts import KnownPrompts
from shared.messages.base import pack_int32
from shared.prompt_chain import block_digests
from tests.small_blocks import small_blocks

NAMESPACES = ("0" * 32, "1" * 32)


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    """Blocks of 16 tokens."""
    with small_blocks(16):
        yield


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call that hashes."""
    found: list[int] = []

    def counted(namespace: str, prompt: bytes, *, above: bytes = b"") -> bytes:
        found.append(len(prompt))
        return block_digests(namespace, prompt, above=above)

    monkeypatch.setattr(known_prompts, "block_digests", counted)
    return found


def prompt(*spans: tuple[int, int]) -> bytes:
    """So many blocks of the same token each, one span behind the other, and three tokens."""
    return pack_int32([token for token, count in spans for _ in range(16 * count)] + [9, 9, 9])


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(NAMESPACES),
            st.lists(st.tuples(st.integers(1, 2), st.integers(0, 12)), max_size=4),
            st.booleans(),
        ),
        max_size=12,
    ),
    most_bytes=st.sampled_from([0, 4_000, 1 << 20]),
)
def test_digests_are_those_of_hashing(asked: list[tuple[str, list[tuple[int, int]], bool]], most_bytes: int) -> None:
    """Whatever was asked before, in whatever namespace."""
    known = KnownPrompts(most_bytes)
    with small_blocks(16):
        for namespace, spans, keep in asked:
            tokens = prompt(*spans)

            assert known.block_digests(namespace, tokens, keep=keep) == block_digests(namespace, tokens)
            assert known.nbytes <= most_bytes
            assert known.nbytes == sum(each.nbytes for each in known._prompts.values())
            assert set(known._by_block.values()) <= set(known._prompts)


def test_a_front_that_is_known_is_compared_and_not_hashed(hashed: list[int]) -> None:
    """But for the block that says which prompt it is known of, and what follows it."""
    known = KnownPrompts()
    known.block_digests(NAMESPACES[0], prompt((1, 20)), keep=True)
    hashed.clear()

    known.block_digests(NAMESPACES[0], prompt((1, 20), (2, 3)), keep=True)
    known.block_digests(NAMESPACES[0], prompt((1, 20), (3, 3)), keep=True)

    assert hashed == [64] * (1 + 3 + 1 + 3)


def test_prompts_with_one_front_are_all_found(hashed: list[int]) -> None:
    """Where a prompt leaves one that is known, a block is hashed, by which another one is found."""
    known = KnownPrompts()
    for token in (2, 3):
        known.block_digests(NAMESPACES[0], prompt((1, 10), (token, 20)), keep=True)
    hashed.clear()

    known.block_digests(NAMESPACES[0], prompt((1, 10), (2, 20)), keep=True)

    assert hashed == [64, 64]


def test_a_prompt_takes_the_place_of_what_it_continues() -> None:
    """A session takes the memory of its last turn; what must not be kept takes none."""
    known = KnownPrompts()
    for turn in range(1, 6):
        known.block_digests(NAMESPACES[0], prompt((1, 10 * turn)), keep=True)
    taken = known.nbytes
    known.block_digests(NAMESPACES[0], prompt((2, 50)), keep=False)
    once = KnownPrompts()
    once.block_digests(NAMESPACES[0], prompt((1, 50)), keep=True)

    assert known.nbytes == taken == once.nbytes


def test_threads_share_what_is_known() -> None:
    """The longest prompts are looked up in threads."""
    known = KnownPrompts(20_000)

    def work(number: int) -> bool:
        tokens = prompt((1, 10), (number % 5, 10), (number % 7, 10))
        return known.block_digests(NAMESPACES[0], tokens, keep=True) == block_digests(NAMESPACES[0], tokens)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(200)))

    assert known.nbytes == sum(each.nbytes for each in known._prompts.values()) <= 20_000
