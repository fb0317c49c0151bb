"""The cache of blocks: what hits, what goes, and what policies are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import services.scheduler.policies  # noqa: F401  They are simulated, too.
from bench.blocks import BlockCache, BlockHits, BlockRequest, BlockRequests, read_blocks, run_blocks
from bench.blocks_hotness import FilterHotness
from services.scheduler.core.cache.eviction import POLICIES, make_policy
from services.scheduler.core.cache.eviction.policy import Moment
from services.scheduler.core.cache.eviction.ranked import LruPolicy
from services.scheduler.core.cache.prefix_tree import Node
from shared.errors import InvalidRequest, InvariantViolated
from shared.messages.cell_events import CellConfig
from thermocline.testing.exact_hotness import ExactHotness


def requests_of(*prompts: str | list[int]) -> list[BlockRequest]:
    """Requests whose blocks are named by letters."""
    found = BlockRequests(16)
    for prompt in prompts:
        found.append(prompt)
    return found.requests


def lru_cache(capacity: int) -> BlockCache:
    """A cache of so many blocks under LRU."""
    return BlockCache(make_policy("lru", capacity * 16, CellConfig()), capacity, ExactHotness(), block_tokens=16)


def pseudo_random(count: int, many: int) -> list[BlockRequest]:
    """Prompts of one to five blocks over a small alphabet, the same every time."""
    value, prompts = 99, []
    for _ in range(count):
        value = (value * 1_103_515_245 + 12_345) % 2**31
        first, length = (value >> 16) % many, 1 + (value >> 8) % 5
        prompts.append([first, *(((value >> (20 + step)) + step) % 3 for step in range(length - 1))])
    return requests_of(*prompts)


def test_request_hits_its_longest_resident_prefix() -> None:
    """Blocks count as hits from the start on, as far as they are resident."""
    cache = lru_cache(10)

    assert [cache.ask(request) for request in requests_of("abc", "abd", "abc", "xbc")] == [0, 2, 3, 0]


def test_same_name_below_another_block_is_another_block() -> None:
    """A block is what it is by all that comes before it."""
    first, second = requests_of("ab", "cb")

    assert first.blocks[1] != second.blocks[1]


def test_room_is_made_from_leaves_of_other_paths() -> None:
    """The request's own path stays, though its lower blocks were used longest ago."""
    cache = lru_cache(4)
    for request in requests_of("ab", "xy"):
        cache.ask(request)

    hits = [cache.ask(request) for request in requests_of("ab", "xy", "abc", "xy", "abc")]

    # For c goes y, which is below x; for y then goes c, though x was used longer ago before that request.
    assert hits == [2, 2, 2, 1, 2]


def test_request_longer_than_the_pool_keeps_its_first_blocks() -> None:
    """What fits is kept from the front."""
    cache = lru_cache(3)
    hits = [cache.ask(request) for request in requests_of("abcde", "abcde", "x", "abc")]

    assert hits == [0, 3, 0, 2]


def test_pool_never_holds_more_than_its_capacity() -> None:
    """After every request of a longer run, under every policy."""
    for name in POLICIES:
        cache = BlockCache(make_policy(name, 12 * 16, CellConfig()), 12, ExactHotness(), block_tokens=16)
        for request in pseudo_random(300, 20):
            cache.ask(request)

            assert len(cache) <= 12


def test_policy_that_names_what_may_not_go_is_found_out() -> None:
    """The cache trusts no policy."""

    class Wrong(LruPolicy):
        """Names an inner node."""

        def victim(self, evictable: Callable[..., Any], moment: Moment) -> Node:
            return inner

    cache = BlockCache(Wrong(capacity=32), 2, ExactHotness(), block_tokens=16)
    ab, x = requests_of("ab", "x")
    cache.ask(ab)
    inner = cache._nodes[1]

    with pytest.raises(InvariantViolated, match="may not be evicted"):
        cache.ask(x)


def test_last_part_is_counted_apart() -> None:
    """The last fifth of the requests, beside all of them."""
    figures = run_blocks(lru_cache(10), requests_of("a", "a", "a", "b", "ac"))

    assert figures == BlockHits(hits=3, blocks=6, late_hits=1, late_blocks=2)
    assert (figures.ratio, figures.late_ratio) == (0.5, 0.5)


def test_trace_is_read_with_times_and_lengths(tmp_path: Path) -> None:
    """Milliseconds become nanoseconds, and the prompt's length is the recorded one."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 700, "output_length": 1, "hash_ids": [5, 6]}\n')

    (request,) = read_blocks(path)

    assert request == ([0, 1], 3_000_000, 700, 1)


def test_malformed_line_is_named(tmp_path: Path) -> None:
    """The number of the line is in the error."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 700, "output_length": 1, "hash_ids": [5, 6]}\nnonsense\n')

    with pytest.raises(InvalidRequest, match=":2:"):
        read_blocks(path)


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    """The figures of this cache are in blocks of one size."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3, "input_length": 20, "output_length": 1, "hash_ids": [5, 6], "block_tokens": 16}\n'
    )

    with pytest.raises(InvalidRequest, match="has blocks of 16 tokens; here they have 512"):
        read_blocks(path)


def test_a_prompt_without_a_named_block_hits_nothing(tmp_path: Path) -> None:
    """It is shorter than a block, and its time may have parts of milliseconds."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0.5, "input_length": 20, "output_length": 1, "hash_ids": []}\n')
    (request,) = read_blocks(path)

    assert tuple(request) == ([], 500_000, 20, 1)
    for name in POLICIES:
        cache = BlockCache(make_policy(name, 4 * 512, CellConfig()), 4, ExactHotness())
        assert [cache.ask(request) for _ in range(2)] == [0, 0]


def test_filter_and_exact_counts_agree_on_a_small_run() -> None:
    """With few prefixes the cuckoo filter mistakes none, so the policy that asks it evicts the same."""
    figures = []
    for hotness in (ExactHotness(aging_requests=8), FilterHotness(0, CellConfig(aging_requests=8))):
        policy = make_policy("hotprefix", 12 * 16, CellConfig())
        cache = BlockCache(policy, 12, hotness, block_tokens=16)
        if isinstance(hotness, FilterHotness):
            hotness.resident = cache.digests
        figures.append([cache.ask(request) for request in pseudo_random(400, 12)])

    assert figures[0] == figures[1]


def test_full_filter_keeps_what_is_resident() -> None:
    """When it must forget, it forgets what was evicted."""
    hotness = FilterHotness(0)
    cache = BlockCache(make_policy("lru", 100 * 16, CellConfig()), 100, hotness, block_tokens=16)
    hotness.resident = cache.digests
    for request in requests_of(*([number] for number in range(hotness.filter.capacity + 2000))):
        cache.ask(request)

    assert all(hotness.lookup(digest)[0] for digest in cache.digests())
    assert hotness.filter.doublings == 0


class Hearing(LruPolicy, tag="hears of ends"):
    """Keeps what it is told of ends, and how many requests had come before."""

    seen: int = 0
    heard: list[tuple[int, int, int]] = []

    def visit(self, path: Sequence[Any], prompt_tokens: int, moment: Moment) -> None:
        self.seen += 1
        assert moment.admission == self.seen

    def ended(self, admission: int, answer_tokens: int) -> None:
        self.heard.append((self.seen, admission, answer_tokens))


def test_length_of_an_answer_is_told_when_it_has_been_sampled() -> None:
    """Not with the request, and in the order of ends; a request without a time has ended when the next one comes."""
    found = BlockRequests(16)
    second = 1_000_000_000
    for name, seconds, answer_tokens in (
        ("a", 1, 100),
        ("b", 2, 10),
        ("c", 3, 1),
        ("d", 5, 1),
        ("e", 0, 7),
        ("f", 0, 7),
    ):
        found.append(name, time_ns=seconds * second, answer_tokens=answer_tokens)
    policy = Hearing()
    cache = BlockCache(policy, 10, ExactHotness(), block_tokens=16)
    for request in found.requests:
        cache.ask(request)

    assert policy.heard == [(2, 2, 10), (3, 3, 1), (3, 1, 100), (5, 5, 7)]
