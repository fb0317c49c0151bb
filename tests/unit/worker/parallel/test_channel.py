"""Messages between two ends of a socket."""

from __future__ import annotations

import socket

import pytest

from services.worker.parallel.channel import Channel, ChannelClosed
from services.worker.parallel.orders import JoinGroup, RankAnswer, RankFailed, RankLoaded, RankOrder
from shared.errors import CodecError, TransportError


def ends(timeout_s: float = 5.0) -> tuple[Channel, Channel]:
    """Rank 0's end and the other one."""
    ours, theirs = socket.socketpair()
    return Channel(ours, RankAnswer, timeout_s=timeout_s), Channel(theirs, RankOrder, timeout_s=timeout_s)


def test_messages_arrive_whole_and_in_order() -> None:
    """Two that were sent before anybody read."""
    ours, theirs = ends()

    theirs.send(RankLoaded(weight_bytes=1))
    theirs.send(RankLoaded(weight_bytes=2))

    assert [ours.receive(1), ours.receive(1)] == [RankLoaded(weight_bytes=1), RankLoaded(weight_bytes=2)]


def test_a_message_that_nobody_takes_is_given_up() -> None:
    """Sending is bounded by what the socket holds and by time."""
    ours, _theirs = ends(timeout_s=0.01)

    with pytest.raises(TransportError, match="took nothing for"):
        ours.send(RankFailed(reason="x" * 2**22))


def test_waiting_for_a_message_ends() -> None:
    """By time, or because the other side is gone."""
    ours, theirs = ends()
    with pytest.raises(TransportError, match="no message"):
        ours.receive(0.01)
    theirs.close()

    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send(JoinGroup())


def test_what_is_no_message_of_the_other_side_is_refused() -> None:
    """An order is no answer."""
    ours, theirs = ends()
    theirs.send(JoinGroup())

    with pytest.raises(CodecError):
        ours.receive(1)
