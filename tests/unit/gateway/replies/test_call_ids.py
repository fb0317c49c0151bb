"""Ids of calls are the same wherever they are computed, and differ between calls."""

from __future__ import annotations

import re

from services.gateway.replies.call_ids import call_id


def test_ids_follow_from_the_request_and_the_place_of_the_call() -> None:
    """Two calls never share one."""
    ids = {call_id(f"chatcmpl-{request}-0", index) for request in range(20) for index in range(20)}

    assert len(ids) == 400
    assert call_id("r", 0) == call_id("r", 0)
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", each) for each in ids)


def test_short_ids_have_nine_letters_or_digits() -> None:
    """As templates of Mistral's models want them."""
    ids = {call_id(f"r{request}", index, is_short=True) for request in range(20) for index in range(20)}

    assert len(ids) == 400
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", each) for each in ids)
