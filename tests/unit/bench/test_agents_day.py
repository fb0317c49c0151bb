"""An agent's day: what is counted of each turn."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.agents_day import CONTEXT, Session, figures_of, model_with_positions, sessions_of


def answer(prompt: int, output: int, cached: int) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"usage": usage, "choices": [{"message": {"content": "said"}}]}


def session_with(*answers: dict[str, Any]) -> Session:
    (session,) = sessions_of(1, 1)
    for each in answers:
        session.say()
        session.hear(each)
    return session


def test_a_turn_is_compared_with_all_of_the_turn_before_it() -> None:
    """Its prompt and what was answered; the first turn has none before it."""
    session = session_with(answer(1000, 20, 0), answer(1100, 20, 1020), answer(1200, 20, 560))

    assert [turn.reused for turn in session.turns] == [None, 1.0, 0.5]


def test_the_whole_conversation_is_sent_again() -> None:
    """With what was answered, as it was said."""
    session = session_with(answer(10, 2, 0), answer(20, 2, 12))

    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2]["content"] == "said"


def test_figures_name_the_worst_turn_and_how_many_miss_the_target() -> None:
    """The share of all tokens weighs turns by their length."""
    session = session_with(answer(1000, 0, 0), answer(3000, 0, 1000), answer(3100, 0, 1500))

    found = figures_of([session], kills=3)

    assert found["reused_least"] == 0.5
    assert found["turns_below_target"] == 1
    assert found["reused_of_all"] == pytest.approx(2500 / 4000)
    assert found["worst"][0]["number"] == 2
    assert found["kills"] == 3


def test_the_model_gets_positions_for_a_whole_session(tmp_path: Path) -> None:
    """In both places where a length is bound."""
    made = model_with_positions(tmp_path)

    assert json.loads((made / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"] == CONTEXT
    assert json.loads((made / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"] == CONTEXT
