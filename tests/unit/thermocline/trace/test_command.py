"""``thermocline trace`` as a command: its verbs, and how it refuses what makes no sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from thermocline.__main__ import main
from thermocline.cache import gateway_client
from thermocline.trace import __main__ as command
from thermocline.trace.__main__ import Outcome
from thermocline.trace.format import TraceRequest


def mocked(url: httpx.URL, answer: Callable[[httpx.Request], httpx.Response], **given: Any) -> httpx.AsyncClient:
    """A client whose requests ``answer`` answers."""
    return httpx.AsyncClient(base_url=url, transport=httpx.MockTransport(answer), headers=given["headers"])


def test_a_verb_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is neither a verb nor a file says which there are."""
    with pytest.raises(SystemExit) as refused:
        main(["trace", "sent"])

    assert refused.value.code == 2
    assert "'sent' is none of import, send; did you mean send?" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "the-key"])
def test_a_gateway_with_keys_says_that_it_wants_one(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is of the environment, and one that is missing is no gateway that cannot be reached."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")
    sent: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers)
        return httpx.Response(
            401, json={"error": {"message": "a valid API key is required", "code": "invalid_api_key"}}
        )

    monkeypatch.setattr(gateway_client, "connect", lambda url, **given: mocked(url, answer, **given))
    monkeypatch.setenv("THERMOCLINE_API_KEY", key)

    assert main(["trace", "send", str(trace)]) == 2
    assert capsys.readouterr().err == "thermocline trace: a valid API key is required\n"
    assert [headers.get("authorization") for headers in sent] == [f"Bearer {key}" if key else None]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "cannot read /nowhere: No such file or directory"),
        (["{trace}", "--requests", "0"], "--requests: '0' is not a whole number from 1"),
        (["{trace}", "--length-scale", "0"], "--length-scale: '0' is not a number above 0"),
    ],
)
def test_what_cannot_be_sent_exits_with_two(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")

    try:
        code = main(["trace", "send", *(argument.format(trace=trace) for argument in arguments)])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]

    told = capsys.readouterr().err
    assert code == 2
    assert complaint in told
    assert told.count("\n") == 1


def test_requests_of_a_reversed_trace_are_sent_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them is late."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * place, "input_length": 5, "output_length": 1, "hash_ids": [place]} for place in range(9)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    sent: list[TraceRequest] = []

    async def run(options: object, requests: list[TraceRequest]) -> Outcome:
        sent.extend(requests)
        return Outcome()

    monkeypatch.setattr(command, "_run", run)

    assert main(["trace", "send", str(path), "--json"]) == 0
    assert [request.timestamp for request in sent] == [1000 * place for place in range(9)]
    assert capsys.readouterr().err == ""


def test_a_scale_that_leaves_nothing_of_a_block_is_refused_before_a_request_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the greatest that fits; the cell is not asked."""
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2], "block_tokens": 16}
    path.write_text(json.dumps(line) + "\n")

    assert main(["trace", "send", str(path), "--url", "http://127.0.0.1:9", "--length-scale", "17"]) == 2
    assert "give a --length-scale of 16 at most" in capsys.readouterr().err


@pytest.mark.parametrize("is_flag_first", [False, True])
def test_the_line_of_the_last_release_sends(
    is_flag_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how it is written now; an empty trace ends it before it asks a cell."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    line = [str(trace), "--requests", "3"]

    assert main(["trace", *(line[1:] + line[:1] if is_flag_first else line)]) == 2

    captured = capsys.readouterr()
    assert "trace FILE is called trace send FILE now" in captured.err
    assert "holds no request" in captured.err
