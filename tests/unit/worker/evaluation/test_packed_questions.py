"""Questions with all their answers in one batch."""

from __future__ import annotations

import pytest

from services.worker.evaluation.packed_questions import Asked, pack
from shared.errors import InvalidRequest

TWO = (Asked((1, 2, 3), ((4, 5, 6), (7, 8))), Asked((9,), ((10,),)))


def test_a_question_is_computed_once_for_all_its_answers() -> None:
    """Rows are the question's tokens and all of each answer but its last, which predicts nothing."""
    packed = pack(TWO, 100)

    assert packed.ids.tolist() == [1, 2, 3, 4, 5, 7, 9]
    assert packed.positions.tolist() == [100, 101, 102, 103, 104, 103, 100]
    assert [one.rows for one in TWO] == [6, 1]


def test_an_answer_sees_its_question_and_itself() -> None:
    """Rows of one answer see neither the other answer nor what comes later."""
    visible = pack(TWO, 0).visible[0].int().tolist()

    assert visible == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_every_token_of_an_answer_is_predicted_by_the_row_before_it() -> None:
    """The question's last row predicts the first token of every answer."""
    packed = pack(TWO, 0)

    predictions = list(zip(packed.predicting.tolist(), packed.targets.tolist(), strict=True))

    assert [[predictions[start:end] for start, end in answers] for answers in packed.answers] == [
        [[(2, 4), (3, 5), (4, 6)], [(2, 7), (5, 8)]],
        [[(6, 10)]],
    ]


def test_padding_belongs_to_no_question() -> None:
    """Shorter questions are padded with places that are neither valid nor asking and see themselves alone."""
    packed = pack(TWO, 0)

    assert packed.valid[1].tolist() == [True] + [False] * 5
    assert packed.asking.sum(dim=1).tolist() == [3, 1]
    assert packed.visible[1, 4].nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("asked", [(), (Asked((), ((1,),)),), (Asked((1,), ()),), (Asked((1,), ((2,), ())),)])
def test_nothing_empty_is_packed(asked: tuple[Asked, ...]) -> None:
    """A question or an answer without tokens has no probability."""
    with pytest.raises(InvalidRequest):
        pack(asked, 10)
