"""The memory of answers stays within its bytes, and forgets what was unused for longest."""

from __future__ import annotations

from services.gateway.turns.memory import MARKED_TEXTS, MOST_ALTERNATIVES, AnswerMemory, Said
from shared.messages.base import pack_int32


def said(text: str, *tokens: int) -> Said:
    return Said(pack_int32(tokens or (1, 2, 3)), text)


def test_the_longest_unused_goes_first() -> None:
    """Recalling counts as use."""
    told: list[int] = []
    memory = AnswerMemory(6_000, told.append)
    for number in range(4):
        memory.remember(f"p{number}", said("x" * 1_000))
        memory.recall(["p0"])

    memory.remember("p4", said("x" * 1_000))

    assert list(memory.recall(f"p{number}" for number in range(5))) == ["p0", "p3", "p4"]
    assert told[-1] == memory.nbytes <= 6_000


def test_an_answer_is_known_once_and_the_latest_comes_first() -> None:
    """At most a few of one place are kept."""
    memory = AnswerMemory(2**20)
    for number in [*range(10), 7]:
        memory.remember("p", said(f"answer {number}", number))

    (answers,) = memory.recall(["p"]).values()

    assert [each.text for each in answers] == ["answer 7", "answer 9", "answer 8", "answer 6"]
    assert len(answers) == MOST_ALTERNATIVES


def test_what_others_know_never_replaces_what_was_said_here() -> None:
    """That nothing is known elsewhere is remembered too."""
    memory = AnswerMemory(2**20)
    memory.remember("here", said("own"))
    memory.learn("here", [said("other", 9)])
    memory.learn("nowhere", [])

    assert memory.recall(["here", "nowhere", "unheard"]) == {"here": (said("own"),), "nowhere": ()}
    memory.remember("nowhere", said("own"))
    assert memory.recall(["nowhere"]) == {"nowhere": (said("own"),)}


def test_bytes_are_given_back() -> None:
    """Replacing a place's answers does not add up."""
    memory = AnswerMemory(2**20)
    for _ in range(100):
        memory.remember("p", said("answer"))

    once = AnswerMemory(2**20)
    once.remember("p", said("answer"))
    assert memory.nbytes == once.nbytes


def test_marks_are_bounded() -> None:
    """The oldest is forgotten."""
    memory = AnswerMemory(2**20)
    for number in range(MARKED_TEXTS + 1):
        memory.mark(number.to_bytes(16, "little"), f"p{number}")

    assert memory.stood_at((0).to_bytes(16, "little")) == ""
    assert memory.stood_at((1).to_bytes(16, "little")) == "p1"
