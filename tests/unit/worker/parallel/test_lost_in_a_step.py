"""A group that is lost in the middle of a step ends the worker, and no request is blamed for it."""

from __future__ import annotations

import pytest

from services.worker.parallel.group_lost import GroupLost
from tests.unit.worker.driven_executor import Driven, admit, batch, chunk
from tests.unit.worker.fake_model import FakeRunner

PROMPT = [5, 6, 7, 8, 9]


def test_no_request_is_answered_by_a_group_that_is_lost(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step raises, though it has a single request that could be taken for the culprit."""
    driven.give(admit(PROMPT, [7, 2, 5]), batch(chunk(0, 5)))

    def forward(*_: object) -> None:
        raise GroupLost("rank 1 ended")

    monkeypatch.setattr(FakeRunner, "forward", forward)
    with pytest.raises(GroupLost):
        driven.run()

    assert not driven.items()
    assert not driven.finished()
