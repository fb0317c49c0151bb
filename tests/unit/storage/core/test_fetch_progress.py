"""How often a fetch tells how far it is."""

import pytest

from services.storage.core.fetch_progress import REPORTS, FetchProgress


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 10, 64, 1000])
def test_a_fetch_reports_a_few_times_and_never_at_its_end(total: int) -> None:
    """At most eight events on the way, at growing prefixes."""
    progress = FetchProgress(total)
    told = [progress.chunks for _ in range(total) if progress.arrived("disk", 10)]

    assert len(told) <= REPORTS
    assert total not in told
    assert progress.chunks == progress.disk_chunks == total
    assert progress.nbytes == 10 * total
    assert bool(told) == (total > 1)


def test_sources_are_counted_apart() -> None:
    """Chunks of the object store are not the disk's."""
    progress = FetchProgress(3)
    for source in ("disk", "remote", "remote"):
        progress.arrived(source, 1)

    assert (progress.chunks, progress.disk_chunks, progress.remote_chunks) == (3, 1, 2)
