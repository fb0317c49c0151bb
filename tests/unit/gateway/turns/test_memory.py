"""The memory of answers stays within its bytes, and forgets what was unused for longest."""

from __future__ import annotations

from services.gateway.turns.memory import MOST_ALTERNATIVES, MOST_NAMES, AnswerMemory, Said
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


def test_a_text_is_known_once_in_the_ids_that_came_first() -> None:
    """Conversations have gone on from them. The latest text comes first, and a bounded number of one place is kept."""
    memory = AnswerMemory(2**20)
    for number in range(MOST_ALTERNATIVES + 5):
        memory.remember("p", said(f"answer {number}", number))

    stands = memory.remember("p", said("answer 40", 9_999))

    (answers,) = memory.recall(["p"]).values()
    assert stands == said("answer 40", 40)
    assert [each.text for each in answers[:3]] == ["answer 40", "answer 68", "answer 67"]
    assert len(answers) == MOST_ALTERNATIVES
    assert memory.recall(["unheard"]) == {}


def test_bytes_are_given_back() -> None:
    """Replacing a place's answers does not add up."""
    memory = AnswerMemory(2**20)
    for _ in range(100):
        memory.remember("p", said("answer"))

    once = AnswerMemory(2**20)
    once.remember("p", said("answer"))
    assert memory.nbytes == once.nbytes


def test_marks_and_absences_are_bounded() -> None:
    """The oldest are forgotten."""
    memory = AnswerMemory(2**20)
    for number in range(MOST_NAMES + 1):
        memory.mark(number.to_bytes(16, "little"), f"p{number}")
        memory.note_absent(f"e{number}")

    assert memory.stood_at((0).to_bytes(16, "little")) == ""
    assert memory.stood_at((1).to_bytes(16, "little")) == "p1"
    assert [memory.is_absent(f"e{number}") for number in (0, 1, MOST_NAMES)] == [False, True, True]
