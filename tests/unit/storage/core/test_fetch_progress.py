"""How often a fetch tells how far it is."""

import pytest

from services.storage.core.fetch_progress import FetchProgress
from shared.chunks import FETCH_PARTS


@pytest.mark.parametrize("total", [1, 2, 8, 9, 10, 1000])
def test_a_fetch_reports_a_few_times_and_never_at_its_end(total: int) -> None:
    """At most eight events on the way, at growing prefixes."""
    progress = FetchProgress(total)
    told = [progress.chunks for _ in range(total) if progress.arrived("disk", 10)]

    assert len(told) < FETCH_PARTS
    assert total not in told
    assert progress.chunks == progress.disk_chunks == total
    assert progress.nbytes == 10 * total
    assert bool(told) == (total > 1)
