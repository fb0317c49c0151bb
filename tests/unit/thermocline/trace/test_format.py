"""The trace format: parsing, scaling, and deterministic blocks."""

import gzip
import json
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from thermocline.simulate.workloads.trace import spans_of
from thermocline.trace.format import Scale, TraceRequest, prompt_tokens, read_trace

VOCABULARY = range(8, 300)


def test_shared_hash_ids_give_a_shared_prefix_and_no_more() -> None:
    """Prompts agree exactly as far as their hash_ids do."""
    scale = Scale(length=32, time=1)
    first = TraceRequest(timestamp=0, input_length=1600, output_length=5, hash_ids=[1, 2, 3, 4])
    second = TraceRequest(timestamp=9, input_length=1600, output_length=5, hash_ids=[1, 2, 9, 10])

    one, two = (prompt_tokens(r, scale, vocabulary=VOCABULARY) for r in (first, second))

    assert one[:32] == two[:32]
    assert one[32:48] != two[32:48]
    assert len(one) == len(two) == 50
    assert set(one) <= set(VOCABULARY)


def test_lengths_and_times_are_divided_by_the_stated_factors() -> None:
    """A scale of 32 and 4 shrinks 512 tokens to 16 and 8 seconds to 2."""
    scale = Scale(length=32, time=4)
    request = TraceRequest(timestamp=8000, input_length=512, output_length=320, hash_ids=[5])

    tokens = prompt_tokens(request, scale, vocabulary=VOCABULARY)

    assert (len(tokens), scale.output_tokens(request), scale.starts_at_s(request)) == (16, 10, 2.0)


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '{"timestamp": 1}',
        '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": []}',
        '{"timestamp": "x", "input_length": 5, "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    """The error names file and line."""
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(good) + "\n" + line + "\n")

    with pytest.raises(InvalidRequest, match=r"trace\.jsonl:2"):
        list(read_trace(path))


def test_a_missing_file_is_a_typed_error(tmp_path: Path) -> None:
    """A path that does not exist is the caller's fault, and is named."""
    with pytest.raises(InvalidRequest, match="cannot read"):
        list(read_trace(tmp_path / "absent.jsonl"))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("input_length", 3_000_000_000, "input_length is 3000000000; it must be from 1 to 2147483647"),
        ("input_length", 10**23, "input_length is 1"),
        ("input_length", 0, "input_length is 0"),
        ("output_length", 2**31, "output_length is 2147483648; it must be from 0 to 2147483647"),
        ("output_length", -1, "output_length is -1"),
        ("timestamp", 10**400, "timestamp is 1"),
        ("timestamp", -1, "timestamp is -1"),
        ("input_length", 6000, "hash_ids names 1 block; 6,000 tokens are 12 blocks of 512, which is the size unless"),
        ("block_tokens", 0, "block_tokens is 0; it must be from 1"),
        ("block_tokens", 2, "hash_ids names 1 block; 5 tokens are 3 blocks of 2"),
        ("hash_ids", list(range(100)), "hash_ids names 100 blocks; 5 tokens are 1 block of 512"),
        ("input_length", 6000, "hash_ids names 1 block; 6,000 tokens are 12 blocks of 512"),
    ],
)
def test_a_number_out_of_range_is_named(tmp_path: Path, field: str, value: object, says: str) -> None:
    """With its bounds."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], field: value}))

    with pytest.raises(InvalidRequest, match=rf"trace\.jsonl:1: {says}"):
        list(read_trace(path))


@pytest.mark.parametrize("length", [5, 511, 512, 513, 600, 1023])
def test_a_last_block_that_is_not_full_may_lack_a_name(tmp_path: Path, length: int) -> None:
    """Some writers name only whole blocks, and of a prompt shorter than that none."""
    path = tmp_path / "trace.jsonl"
    named = [1] * (length // 512)
    path.write_text(json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": named}))

    (request,) = read_trace(path)

    assert sum(span.tokens for span in spans_of(request, 7)) == length
    assert len(prompt_tokens(request, Scale(length=1, time=1), vocabulary=VOCABULARY)) == length


def test_a_trace_may_have_blocks_of_another_size_and_parts_of_milliseconds(tmp_path: Path) -> None:
    """Requests share as many tokens as their common blocks have."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": time, "input_length": 40, "output_length": 1, "hash_ids": names, "block_tokens": 16}
        for time, names in ((0.5, [1, 2, 3]), (61.25, [1, 2, 4]))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    one, two = read_trace(path)

    assert (one.timestamp, two.timestamp) == (0.5, 61.25)
    assert [span.tokens for span in spans_of(one, 0)] == [16, 16, 8]
    assert list(spans_of(one, 0))[:2] == list(spans_of(two, 1))[:2]
    prompts = [prompt_tokens(each, Scale(length=2, time=1), vocabulary=VOCABULARY) for each in (one, two)]
    assert prompts[0][:16] == prompts[1][:16]
    assert prompts[0][16:] != prompts[1][16:]
    assert [len(prompt) for prompt in prompts] == [20, 20]


def test_a_scale_that_leaves_nothing_of_a_block_is_refused() -> None:
    """Whole blocks would be lost, and with them what prompts share."""
    request = TraceRequest(timestamp=0, input_length=32, output_length=5, hash_ids=[1, 2], block_tokens=16)

    with pytest.raises(InvalidRequest, match="divided by 32 leave nothing of a block of 16 tokens"):
        prompt_tokens(request, Scale(length=32, time=1), vocabulary=VOCABULARY)


def test_a_compressed_trace_is_named_as_such(tmp_path: Path) -> None:
    """Published traces are often downloaded that way."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))

    with pytest.raises(InvalidRequest, match="is compressed by gzip: unpack it first"):
        list(read_trace(path))


def test_tokens_behind_the_last_named_block_are_the_request_s_own() -> None:
    """The prompt has its length, and shares only what is named."""
    scale = Scale(length=2, time=1)
    request = TraceRequest(timestamp=0, input_length=1000, output_length=5, hash_ids=[1])

    one, two = (prompt_tokens(request, scale, vocabulary=VOCABULARY, number=number) for number in (3, 4))

    assert len(one) == len(two) == 500
    assert one[:256] == two[:256]
    assert one[256:272] != two[256:272]
    assert set(one) <= set(VOCABULARY)


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    """They count as lines, and not as requests."""
    line = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n"
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\ufeff{line}\n  \n{line}{{}}\n", encoding="utf-8")

    assert len(list(read_trace(path, 2))) == 2
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl:5"):
        list(read_trace(path))
