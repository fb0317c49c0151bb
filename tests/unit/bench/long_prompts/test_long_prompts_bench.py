"""The bench of long prompts: what is read of an answer, how figures are made, and where targets stand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.long_prompts.__main__ import faults, parser, small
from bench.long_prompts.asking import Asker, AskFailed, Sample
from bench.long_prompts.figures import of_samples, ratio, spread
from bench.long_prompts.fixed import TokenTap, with_targets
from bench.long_prompts.session import Turn
from shared.codec import encode
from shared.messages.tokens import Timing, TokenBatch, TokenItem
from thermocline.load.http_client import OnData, Response
from tools.pages import targets

PARTS = {"accept": 2.0, "broker": 3.0, "queue": 1.0, "compute": 9.0, "deliver": 0.5}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Scripted:
    """Answers with these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.body = pieces, b""

    async def send(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        self.body = body
        assert on_data is not None
        for number, piece in enumerate(self.pieces):
            on_data(piece, 1e9 + number)
        return Response(status=200)


def asked(*pieces: bytes, explains: bool = True) -> tuple[Sample, dict[str, Any]]:
    asker = Asker("http://127.0.0.1:1", "m", explains=explains)
    http = asker._http = Scripted(*pieces)  # type: ignore[assignment]
    sample = asyncio.run(asker.ask([{"role": "user", "content": "x"}]))
    return sample, json.loads(http.body)


def test_the_first_event_with_a_choice_is_the_first_token() -> None:
    """A first token may have no text. The server's own time counts where it began the stream without a token."""
    nothing = event(choices=[])
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    parts = [{"name": name, "ms": ms} for name, ms in PARTS.items()] + [{"name": "queue", "ms": 1.0}]
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}

    def end(ttft_ms: float) -> bytes:
        explanation = {"request_id": "r", "ttft_ms": ttft_ms, "parts": parts}
        return event(choices=[{"delta": {"content": "so"}}], usage=usage, explanation=explanation)

    early, _ = asked(role, end(16.5))
    late, body = asked(nothing, role, end(16.5) + b"data: [DONE]\n\n")
    waited, _ = asked(role, end(2e12))

    assert late.ttft_ms - early.ttft_ms == pytest.approx(1e3, abs=100)
    assert (late.text, late.prompt_tokens, late.cached_tokens, late.answer_id) == ("so", 9, 8, "r")
    assert late.parts["queue"] == 2.0
    assert waited.ttft_ms == 2e12
    assert body["explain"] is True


def test_an_answer_without_its_explanation_or_with_an_error_is_a_failure() -> None:
    """Figures must not lack what they are said to be made of; a peer explains nothing."""
    token = event(choices=[{"delta": {"content": "a"}}])

    with pytest.raises(AskFailed):
        asked(token)
    with pytest.raises(AskFailed):
        asked(token, event(error={"message": "no"}), explains=False)
    assert asked(token, explains=False)[0].parts == {}


def test_what_the_model_took_is_not_outside() -> None:
    """Nor is the way back before the first step."""
    sample = Sample(parts=PARTS)

    assert sample.outside_ms == 6.5
    assert sample.before_first_step_ms == 6.0


def test_a_spread_of_few_has_its_largest_as_the_last_percentile() -> None:
    """Of a hundred and more it is the 99th of a hundred."""
    assert spread([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "mean": 2.0}
    assert spread(range(200))["p99"] == 198


def test_bytes_allowed_grow_with_what_is_new() -> None:
    """The old part of a prompt does not count."""
    turn = Turn(Sample(prompt_tokens=100_000), new_tokens=1_000, nbytes={"inputs": 3_000, "outputs": 4_120})

    assert turn.of_allowed == 2.0


def test_the_tap_finds_when_first_tokens_were_sampled() -> None:
    """Among messages of later tokens, whose lines may come in any pieces."""
    tap = TokenTap("", "")
    items = (
        TokenItem(request_id="a", attempt=1, index=0, tokens=(1,), timing=Timing(first_token_ns=5)),
        TokenItem(request_id="b", attempt=1, index=4, tokens=(2,)),
    )
    data = encode(TokenBatch(worker_id="w", incarnation="i", step=1, items=items))
    heard = b"INFO {}\r\n" + b"MSG tc.tokens.g 1 %d\r\n%s\r\n" % (len(data), data)
    tap.data_received(heard[:20])
    tap.data_received(heard[20:])

    assert tap.sampled_ns() == {"a": 5}


def test_every_target_is_known_to_the_pages() -> None:
    """Whether it is met is told of the figure that it bounds."""
    figures = {"first_step_ms": spread([2.6]), "delivered_ms": spread([0.4])}
    cached = of_samples([Sample(ttft_ms=20.0)]) | {"target_cached_ttft_p50_ms": 25.0, "a over b": ratio(16, 2, 8.0)}
    found = list(
        targets.of("long_prompts", {"fixed": with_targets({"idle": figures, "busy": figures}), "cached": cached})
    )

    assert [target.is_met for target in found] == [False, True, True] * 2 + [True, True]
    assert (found[0].measured, found[0].wanted) == ("2.6 ms", "≤ 2.5 ms")
    assert (found[2].measured, found[2].wanted) == ("0.40 ms", "≤ 0.5 ms")


def test_only_a_whole_run_is_saved() -> None:
    """A small one, or a part, would replace all figures."""
    line = parser().parse_args(["--smoke", "--save", "--only", "cached,nothing"])
    small(line)

    found = faults(line)
    assert len(found) == 2
    assert "nothing" in found[0]
