"""What is asked follows from the seed and is of every kind."""

from thermocline.chaos.workload import body_of, draw_scripts
from thermocline.demo.workload import TokenCounter
from thermocline.supervisor.config import bundled_model

MODEL = bundled_model()
assert MODEL is not None
TOKENIZER = TokenCounter(MODEL / "tokenizer.json")
SCRIPTS = draw_scripts(5, 60, TOKENIZER)


def test_a_seed_gives_the_same_scripts_again() -> None:
    """And a longer list begins with the shorter."""
    assert draw_scripts(5, 60, TOKENIZER) == SCRIPTS
    assert draw_scripts(5, 20, TOKENIZER) == SCRIPTS[:20]
    assert draw_scripts(6, 60, TOKENIZER) != SCRIPTS


def test_scripts_are_of_every_kind_and_share_documents() -> None:
    """Chats and completions, one turn and several, greedy and drawn."""
    assert {script.endpoint for script in SCRIPTS} == {"/v1/chat/completions", "/v1/completions"}
    assert {len(script.turns) for script in SCRIPTS} == {1, 2, 3}
    assert {turn.temperature > 0 for script in SCRIPTS for turn in script.turns} == {True, False}
    assert 5 < len({script.document for script in SCRIPTS}) < 30


def test_what_is_drawn_is_drawn_with_a_seed() -> None:
    """Nothing could be compared without one."""
    turns = [turn for script in SCRIPTS for turn in script.turns if turn.temperature > 0]

    assert all(turn.seed is not None and turn.top_k for turn in turns)


def test_a_later_turn_begins_with_the_earlier_ones_and_their_answers() -> None:
    """So that it shares a prefix with them."""
    script = next(script for script in SCRIPTS if len(script.turns) == 3)

    first = body_of(script, 0, [], "m")["messages"]
    third = body_of(script, 2, ["one", "two"], "m")["messages"]

    assert third[: len(first)] == first
    assert [m["content"] for m in third if m["role"] == "assistant"] == ["one", "two"]
    assert third[-1] == {"role": "user", "content": script.turns[2].text}
