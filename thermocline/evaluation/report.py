"""The figures as a table. Pure."""

from __future__ import annotations

from thermocline.cache import tables
from thermocline.evaluation.figures import Evaluation

_COLUMNS = (
    "method",
    "ratio",
    "accuracy",
    "drop, points",
    "± error",
    "lost",
    "gained",
    "nats lost",
    "KV read",
    "fallbacks",
)


def table(evaluation: Evaluation) -> str:
    """Return a heading, a row per method and ratio (drops and errors in percentage points), and the deviation."""
    whole = ["whole prefix", "100%", f"{evaluation.accuracy:.1%}", "", f"{evaluation.standard_error_points:.2f}"]
    rows = [whole + [""] * (len(_COLUMNS) - len(whole))]
    for one in evaluation.methods:
        rows.append(
            [
                one.method,
                f"{one.ratio:.0%}",
                f"{one.accuracy:.1%}",
                f"{one.drop_points:.2f}",
                f"{one.standard_error_points:.2f}",
                str(one.lost),
                str(one.gained),
                f"{one.nats_lost:.3f}",
                f"{one.read:.0%}",
                f"{one.fallbacks:.0%}",
            ]
        )
    heading = (
        f"{evaluation.model} on {evaluation.task}: {evaluation.questions} questions "
        f"over {evaluation.prefixes} prefixes of {evaluation.prefix_tokens} tokens on average; "
        f"guessing gives {evaluation.chance:.0%}"
    )
    deviation = f"largest difference to recomputation: {evaluation.deviation_nats:.1e} nats"
    return "\n".join([heading, "", *tables.table(_COLUMNS, rows), "", deviation])
