"""Tokens of a step stay on the device, and come home when an event says so."""

from __future__ import annotations

import torch

from services.worker.engine.unread_tokens import Following, UnreadTokens, send_home

CHOSEN = torch.tensor([[7, 8, 9], [1, 0, 1]])


class Arriving:
    """An event behind the copy, which has not been made before somebody waits."""

    def __init__(self) -> None:
        self.host = torch.full_like(CHOSEN, -1)

    def synchronize(self) -> None:
        self.host.copy_(CHOSEN)


def test_tokens_are_read_when_they_have_arrived() -> None:
    """And not what lay in that memory before."""
    event = Arriving()

    assert UnreadTokens(CHOSEN, event.host, event).read() == ([7, 8, 9], [True, False, True])


def test_rows_go_on_in_any_order() -> None:
    """All of them, the first ones, and some that are left."""
    tokens = send_home(CHOSEN)

    assert [Following(tokens, rows).ids().tolist() for rows in ((0, 1, 2), (0, 1), (2,), (2, 0))] == [
        [7, 8, 9], [7, 8], [9], [9, 7],
    ]  # fmt: skip


def test_what_is_sent_home_is_a_copy() -> None:
    """Later tokens are chosen into other memory, but the memory of these may be given away."""
    chosen = CHOSEN.clone()
    tokens = send_home(chosen)

    chosen.zero_()

    assert tokens.read()[0] == [7, 8, 9]
