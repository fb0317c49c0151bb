"""The page of answers lost says what the results say."""

import json
from typing import Any

from bench import quality_page
from bench.quality_page import CHART, PAGE, RECOMMENDED, RESULTS, chart, render


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    """Whoever saves results writes the page with them."""
    document, recommended = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, RECOMMENDED))

    assert PAGE.read_text(encoding="utf-8") == render(document, recommended)
    assert CHART.read_text(encoding="utf-8") == chart(document["results"]["compared"][0])


def test_every_method_is_a_row_and_every_ratio_a_column() -> None:
    """Cells stand in the order of ratios; fallbacks are told where there were any."""

    def figure(method: str, ratio: float, drop: float, fallbacks: float) -> dict[str, Any]:
        figures = {"drop_points": drop, "standard_error_points": 0.25, "read": 0.75, "fallbacks": fallbacks}
        return {"method": method, "ratio": ratio, **figures}

    part = {
        "methods": [
            figure("importance", 0.5, 1.0, 0.5),
            figure("importance", 0.1, 20.0, 0.25),
            figure("random", 0.5, 40.0, 0.0),
            figure("random", 0.1, 90.0, 0.0),
        ]
    }

    assert quality_page._drops(part)[2:] == [
        "| `importance` | 1.0 ± 0.2 | 20.0 ± 0.2 |",
        "| `random` | 40.0 ± 0.2 | 90.0 ± 0.2 |",
    ]
    assert quality_page._reads(part)[0] == "| method | 50% kept | 10% kept |"
    assert quality_page._reads(part)[2:] == ["| `importance` | 75% (50%) | 75% (25%) |", "| `random` | 75% | 75% |"]
