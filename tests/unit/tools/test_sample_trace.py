"""The sample trace is what its generator makes, small, and of use."""

from __future__ import annotations

from thermocline.trace.format import BLOCK_TOKENS, SAMPLE, read_trace
from tools.sample_trace import REQUESTS, lines


def test_the_committed_sample_is_what_the_generator_makes() -> None:
    """`python -m tools.sample_trace` makes it anew after a change."""
    assert SAMPLE.read_bytes() == b"".join(lines())


def test_it_is_a_trace_of_a_size_to_ship() -> None:
    """Its requests come in order, with a block for every 512 tokens begun."""
    requests = list(read_trace(SAMPLE))

    assert len(requests) == REQUESTS
    assert SAMPLE.stat().st_size < 200_000
    assert [request.timestamp for request in requests] == sorted(request.timestamp for request in requests)
    assert all(len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS) for request in requests)


def test_a_block_names_all_that_stands_before_it() -> None:
    """So two prompts with a block in common are equal up to its end."""
    before: dict[int, int] = {}
    for request in read_trace(SAMPLE):
        for parent, block in zip([-1, *request.hash_ids], request.hash_ids, strict=False):
            assert before.setdefault(block, parent) == parent
