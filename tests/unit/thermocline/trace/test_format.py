"""The trace format: parsing, scaling, and deterministic blocks."""

import json
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
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
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": []}',
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
        ("hash_ids", [], "hash_ids is empty"),
    ],
)
def test_a_number_out_of_range_is_named(tmp_path: Path, field: str, value: object, says: str) -> None:
    """With its bounds."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], field: value}))

    with pytest.raises(InvalidRequest, match=rf"trace\.jsonl:1: {says}"):
        list(read_trace(path))


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    """They count as lines, and not as requests."""
    line = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n"
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\ufeff{line}\n  \n{line}{{}}\n", encoding="utf-8")

    assert len(list(read_trace(path, 2))) == 2
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl:5"):
        list(read_trace(path))
