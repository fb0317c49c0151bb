"""What walks have in common."""

from collections.abc import Iterator

import pytest

from services.scheduler.core.cache import labels


@pytest.fixture(autouse=True, scope="module")
def short_labels_are_narrow() -> Iterator[None]:
    """From the first token on: spans of walks are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "LEAST_NARROWED", 1)
        yield
