"""The figures as a table. Pure."""

from __future__ import annotations

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
    """Return a heading of what was asked, and a row a method and ratio; drops and errors in percentage points."""
    rows = [list(_COLUMNS)]
    rows.append(["whole prefix", "100%", f"{evaluation.accuracy:.1%}", "", f"{evaluation.standard_error_points:.2f}"])
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
    rows = [row + [""] * (len(_COLUMNS) - len(row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    heading = (
        f"{evaluation.model} on {evaluation.task}: {evaluation.questions} questions "
        f"over {evaluation.prefixes} prefixes of {evaluation.prefix_tokens} tokens on average; "
        f"guessing gives {evaluation.chance:.0%}"
    )
    deviation = f"largest difference to recomputation: {evaluation.deviation_nats:.1e} nats"
    return "\n".join([heading, "", *lines, "", deviation])
