"""The demo's tables, as a log or a pipe shows them."""

from __future__ import annotations

import io

from rich.console import Console

from thermocline.client import Answer
from thermocline.demo.report import Pass, print_passes, print_sources


def test_the_tables_fit_80_columns_without_losing_a_figure() -> None:
    """Slow machines have long figures, and a console that is no terminal has 80 columns."""
    answers = [Answer(ttft_s=ttft_s, prompt_tokens=1042, cached_tokens=800) for ttft_s in (0.0032, 2.1744, 35.0635)]
    out = io.StringIO()
    console = Console(file=out, width=80)

    print_passes(console, [Pass("restarted", answers * 35, [True] * 105, seconds=1179.14)])
    print_sources(console, [Answer(ttft_s=0.0032), *answers])

    printed = out.getvalue()
    assert "…" not in printed
    assert all(figure in printed for figure in ("2174 ms", "35064 ms", "1179 s", "109,410", "3.2 ms"))
