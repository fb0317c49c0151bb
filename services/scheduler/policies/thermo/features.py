"""What is known of a prefix, as one number: the features that the law tells apart, and the uses above them.

Five bits a feature, and two for the length of the answer: sizes and times by doublings, counts by halves of one. A
step of the scheduler asks for dozens of these, so they are put together by shifts and looked up in a table where they
are small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.policies.thermo.law import COUNT_SHIFT, FEATURE_BITS, PACES, PASSED_SHIFT, shift_of
from services.scheduler.policies.thermo.rules import MOST_USES

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.record import Context, Record

_MOST = PACES - 1
_KNOWN = 1024
_PART_BITS = 8  # Prompts are told apart by doublings of 256 tokens.
_SHORT_ANSWER, _MIDDLE_ANSWER = 32, 256  # Tokens: a label or a number; a paragraph; more.

_ANSWER = FEATURE_BITS
_COUNT, _NEW, _PROMPT, _TURN, _END, _BRANCHES, _CHILDREN = (shift_of(feature) for feature in range(1, 8))


def _halves(count: int) -> int:
    """Small counts as they are, larger ones in steps of half a doubling."""
    if count < 4:
        return count
    octave = count.bit_length()
    return min(2 * octave - 2 + ((count >> (octave - 2)) & 1), _MOST)


_HALVES = tuple(_halves(count) for count in range(_KNOWN))


def code_of(record: Record, context: Context) -> int:
    """The code (see :func:`law.pack`) of a prefix that the request of this context used last."""
    prompt, count, turn = context.prompt, record.count, context.turn
    branches, children, pace = context.branches, record.children, record.pace
    answer = context.answer
    new = prompt - context.known
    pace_bits = 0 if pace < 0 else 1 + int(pace * 1000).bit_length()
    return (
        (pace_bits if pace_bits < _MOST else _MOST)
        | (0 if answer < 0 else 1 + (answer >= _SHORT_ANSWER) + (answer >= _MIDDLE_ANSWER)) << _ANSWER
        | (_HALVES[count] if count < _KNOWN else _halves(count)) << _COUNT
        | ((new >> _PART_BITS).bit_length() << _NEW if new > 0 else 0)
        | (prompt >> _PART_BITS).bit_length() << _PROMPT
        | (_HALVES[turn] if turn < _KNOWN else _halves(turn)) << _TURN
        | (record.end >= prompt) << _END
        | (_HALVES[branches] if branches < _KNOWN else _halves(branches)) << _BRANCHES
        | (_HALVES[children] if children < _KNOWN else _halves(children)) << _CHILDREN
        | record.passed << PASSED_SHIFT
        | (count if count < MOST_USES else MOST_USES) << COUNT_SHIFT
    )
