"""The features of a prefix as one number, its code: those that the law tells apart, and the uses above them.

Five bits a feature, and two for the length of the answer: sizes and times by doublings, counts by halves of one. A step
of the scheduler asks for dozens of codes, so they are put together by shifts and looked up in a table where they are
small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.policies.thermo.law import COUNT_SHIFT, FEATURE_BITS, PACES, PASSED_SHIFT, shift_of
from services.scheduler.policies.thermo.rules import MOST_USES

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.contexts import Contexts
    from services.scheduler.policies.thermo.prefixes import Prefixes

_MOST = PACES - 1
_PART_BITS = 8  # Prompts are told apart by doublings of 256 tokens.
_SHORT_ANSWER, _MIDDLE_ANSWER = 32, 256  # Tokens: a label or a number; a paragraph; more.

_ANSWER = FEATURE_BITS
_COUNT, _NEW, _PROMPT, _TURN, _END, _BRANCHES, _CHILDREN = (shift_of(feature) for feature in range(1, 8))


def _halves(count: int) -> int:
    """Return small counts as they are, larger ones in steps of half a doubling."""
    if count < 4:
        return count
    octave = count.bit_length()
    return min(2 * octave - 2 + ((count >> (octave - 2)) & 1), _MOST)


_HALVES = tuple(_halves(count) for count in range(MOST_USES + 1))


def code_of(prefixes: Prefixes, row: int) -> int:
    """Return the code (see :func:`law.pack`) of a prefix; the request of its context is its last use."""
    return code_with(prefixes, row, code_of_request(prefixes.contexts, prefixes.context[row]))


def code_of_request(contexts: Contexts, context: int) -> int:
    """Return the common part of the codes of all prefixes that a request used last."""
    prompt, answer = contexts.prompt[context], contexts.answer[context]
    new = prompt - contexts.known[context]
    return (
        (0 if answer < 0 else 1 + (answer >= _SHORT_ANSWER) + (answer >= _MIDDLE_ANSWER)) << _ANSWER
        | ((new >> _PART_BITS).bit_length() << _NEW if new > 0 else 0)
        | (prompt >> _PART_BITS).bit_length() << _PROMPT
        | _HALVES[contexts.turn[context]] << _TURN
        | _HALVES[contexts.branches[context]] << _BRANCHES
    )


def code_with(prefixes: Prefixes, row: int, request: int) -> int:
    """Return the code of a prefix, given the part that its request contributes (:func:`code_of_request`)."""
    count, pace = prefixes.count[row], prefixes.pace[row]
    pace_bits = 0 if pace < 0 else 1 + int(pace * 1000).bit_length()
    return (
        request
        | (pace_bits if pace_bits < _MOST else _MOST)
        | _HALVES[count] << _COUNT
        | (prefixes.end[row] >= prefixes.contexts.prompt[prefixes.context[row]]) << _END
        | _HALVES[prefixes.children[row]] << _CHILDREN
        | prefixes.passed[row] << PASSED_SHIFT
        | count << COUNT_SHIFT
    )
