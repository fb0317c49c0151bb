"""Files of prompts for ``thermocline cache prewarm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import OperatorError
from thermocline.cache import prompt_file
from thermocline.cache.prompt_file import Prompt, read_prompts


def written(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_lines_name_their_endpoint(tmp_path: Path) -> None:
    """Prompts and tokens go to completions, conversations to chat; blank lines count as lines only."""
    text = (
        '{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "cache_salt": "s"}\r\n{"tokens": [1, 2]}'
    )
    prompts = read_prompts(written(tmp_path, "prompts.jsonl", text))

    assert prompts == [
        Prompt(line=1, path="/v1/completions", body={"prompt": "a"}),
        Prompt(
            line=3,
            path="/v1/chat/completions",
            body={"cache_salt": "s", "messages": [{"role": "user", "content": "b"}]},
        ),
        Prompt(line=4, path="/v1/completions", body={"prompt": [1, 2]}),
    ]


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    """Even where a line looks like JSON."""
    prompts = read_prompts(written(tmp_path, "prompts.txt", ' two words\r\n\n{"prompt": "a"}\n'))

    assert [(prompt.line, prompt.body["prompt"]) for prompt in prompts] == [(1, " two words"), (3, '{"prompt": "a"}')]


def test_every_malformed_line_is_named_by_its_number(tmp_path: Path) -> None:
    """All of them at once, and nothing is returned that could be sent."""
    lines = ['{"prompt": "a"}', "{", '{"prompt": 1}', '{"prompt": "a", "tokens": [1]}', "{}", '{"tokens": []}',
             '{"tokens": [-1]}', '{"prompt": "a", "salt": "s"}']  # fmt: skip
    with pytest.raises(OperatorError, match="nothing was sent") as refused:
        read_prompts(written(tmp_path, "prompts.jsonl", "\n".join(lines)))

    assert [f"line {number}:" in str(refused.value) for number in range(1, 9)] == [False, *[True] * 7]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """With its line."""
    with pytest.raises(OperatorError, match="line 2"):
        read_prompts(written(tmp_path, "prompts.txt", b"good\n\xff\xfe\n"))


def test_bounds_and_absence_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no prompt, too many prompts, too many bytes."""
    with pytest.raises(OperatorError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(OperatorError, match="no prompt"):
        read_prompts(written(tmp_path, "empty.txt", "\n \n"))
    monkeypatch.setattr(prompt_file, "MAX_PROMPTS", 1)
    with pytest.raises(OperatorError, match="2 prompts, more than 1"):
        read_prompts(written(tmp_path, "many.txt", "a\nb"))
    monkeypatch.setattr(prompt_file, "MAX_BYTES", 2)

    with pytest.raises(OperatorError, match="larger than 2 bytes"):
        read_prompts(tmp_path / "many.txt")
