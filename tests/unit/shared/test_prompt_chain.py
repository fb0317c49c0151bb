"""Chain digests of prompts."""

from __future__ import annotations

from shared.messages.base import pack_int32
from shared.prompt_chain import BLOCK_BYTES, BLOCK_TOKENS, block_digests

NAMESPACE, OTHER = "00" * 16, "01" * 16
PROMPT = pack_int32(range(3 * BLOCK_TOKENS + 5))


def test_only_whole_blocks_have_a_digest() -> None:
    """A part of a block at the end has none, and a prompt shorter than a block has none at all."""
    assert len(block_digests(NAMESPACE, PROMPT)) == 3 * 16
    assert block_digests(NAMESPACE, PROMPT[: BLOCK_BYTES - 4]) == b""


def test_a_chain_goes_on_from_any_of_its_digests() -> None:
    """What follows a block has the digests that it has behind everything."""
    whole = block_digests(NAMESPACE, PROMPT)

    behind = block_digests(NAMESPACE, PROMPT[BLOCK_BYTES:], above=whole[:16])

    assert whole[:16] + behind == whole


def test_a_digest_stands_for_all_tokens_before_its_end() -> None:
    """A change of the first token, or of the namespace, changes every digest."""
    changed = pack_int32([7]) + PROMPT[4:]

    mine, others, elsewhere = (
        block_digests(NAMESPACE, PROMPT),
        block_digests(NAMESPACE, changed),
        block_digests(OTHER, PROMPT),
    )

    for start in range(0, len(mine), 16):
        assert len({each[start : start + 16] for each in (mine, others, elsewhere)}) == 3
