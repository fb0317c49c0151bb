"""What a step says is numbered per target, and the numbers that are remembered are bounded."""

from __future__ import annotations

from services.scheduler.core import new_state
from services.scheduler.core.step import MOST_GATEWAYS, Step
from shared.messages.gateway_notices import GatewayNotice, ResumeNeeded

WORD = ResumeNeeded(request_id="request", attempt=2)


def test_notices_of_a_gateway_are_numbered_on() -> None:
    """Each gateway has numbers of its own, from 1."""
    turn = Step(new_state(), 1, 1)

    for gateway_id in ("a", "b", "a"):
        turn.to_gateway(gateway_id, WORD)

    notices = [output for output in turn.outputs if isinstance(output, GatewayNotice)]
    assert [(notice.gateway_id, notice.number) for notice in notices] == [("a", 1), ("b", 1), ("a", 2)]


def test_the_gateway_that_was_told_nothing_for_longest_is_forgotten_first() -> None:
    """Every life of a gateway has a name of its own, so names would pile up for ever."""
    turn = Step(new_state(), 1, 1)

    for number in range(MOST_GATEWAYS):
        turn.to_gateway(f"gateway-{number}", WORD)
    turn.to_gateway("gateway-0", WORD)
    turn.to_gateway("another", WORD)

    assert len(turn.state.gateways) == MOST_GATEWAYS
    assert turn.state.gateways["gateway-0"] == 2
    assert "gateway-1" not in turn.state.gateways
