"""Features as one number: the same as packing them one by one, whatever they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policies.thermo.features import _halves, code_of
from services.scheduler.policies.thermo.law import COUNT_SHIFT, PACES, RHYTHMS, pack
from services.scheduler.policies.thermo.prefixes import Prefixes
from services.scheduler.policies.thermo.rules import MOST_USES

counts = st.integers(0, MOST_USES)
tokens = st.integers(0, 2**30)


ANSWERS = ((-1, 0), (0, 1), (31, 1), (32, 2), (255, 2), (256, 3), (2**20, 3))
"""Tokens of an answer and what they count as; the first is one that is not known."""


@given(
    counts,
    counts,
    counts,
    counts,
    tokens,
    tokens,
    tokens,
    st.floats(-1.0, 1e5, width=32),
    st.integers(0, 4),
    st.sampled_from(ANSWERS),
)
def test_code_has_all_features_and_the_uses(
    count: int,
    turn: int,
    branches: int,
    children: int,
    prompt: int,
    known: int,
    end: int,
    pace: float,
    passed: int,
    answer: tuple[int, int],
) -> None:
    """Feature by feature in the law's order, each within its bits, with the uses above them."""
    prefixes = Prefixes()
    row, context = prefixes.open(1, 1, 1, end), prefixes.contexts.open(1, 0.0, prompt, users=1)
    prefixes.bind(row, context)
    prefixes.count[row], prefixes.pace[row] = count, pace
    prefixes.children[row], prefixes.passed[row] = children, passed
    contexts = prefixes.contexts
    contexts.known[context], contexts.turn[context] = known, turn
    contexts.branches[context], contexts.answer[context] = branches, answer[0]

    code = code_of(prefixes, row)

    features = (
        (0 if pace < 0 else 1 + int(pace * 1000).bit_length()) + PACES * answer[1],
        _halves(count),
        (max(prompt - known, 0) // 256).bit_length(),
        (prompt // 256).bit_length(),
        _halves(turn),
        int(end >= prompt),
        _halves(branches),
        _halves(children),
        passed,
    )
    assert code == pack(features) | min(count, MOST_USES) << COUNT_SHIFT
    assert code < 2**63


def test_halves_do_not_fall() -> None:
    """More is never a lower step, and small counts are told apart."""
    steps = [_halves(count) for count in range(5000)]

    assert steps == sorted(steps)
    assert steps[:5] == [0, 1, 2, 3, 4]


def test_no_pace_looks_like_an_answer() -> None:
    """A pace of centuries counts as the slowest there is, of a request that has not ended."""
    prefixes = Prefixes()
    row = prefixes.open(1, 1, 1, 16)
    prefixes.bind(row, prefixes.contexts.open(1, 0.0, 16, users=1))
    prefixes.pace[row] = 1e12

    code = code_of(prefixes, row)

    assert code & (RHYTHMS - 1) == PACES - 1
