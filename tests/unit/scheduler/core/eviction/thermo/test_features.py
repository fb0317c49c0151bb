"""Features as one number: the same as packing them one by one, whatever they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.eviction.thermo.features import _halves, code_of
from services.scheduler.core.eviction.thermo.law import COUNT_SHIFT, pack
from services.scheduler.core.eviction.thermo.record import Context, Record
from services.scheduler.core.eviction.thermo.rules import MOST_USES

counts = st.integers(0, 2**20)
tokens = st.integers(0, 2**30)


@given(counts, counts, counts, counts, tokens, tokens, tokens, st.floats(-1.0, 1e9), st.integers(0, 4))
def test_code_has_all_features_and_the_uses(count, turn, branches, children, prompt, known, end, pace, passed):
    """Feature by feature in the law's order, each within its bits, with the uses above them."""
    record = Record(1, end, count=count, pace=pace, children=children, passed=passed)
    context = Context(0.0, prompt, known=known, turn=turn, branches=branches)

    code = code_of(record, context)

    features = (
        0 if pace < 0 else 1 + int(pace * 1000).bit_length(),
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


def test_halves_do_not_fall():
    """More is never a lower step, and small counts are told apart."""
    steps = [_halves(count) for count in range(5000)]

    assert steps == sorted(steps)
    assert steps[:5] == [0, 1, 2, 3, 4]
