"""What a cell was asked for and does not have, for the lines that say that it is ready."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from services.gateway.openai_schema.models import Health
from shared.degradations import line
from thermocline.supervisor.readiness import SERVES, told

MEMBERS = ("storage", "worker")
"""What is told of a process that has not joined, or has not said yet what it lacks."""

HEARD_S = 10.0


async def degraded_lines(base_url: str, admin_key: str = "", *, heard_s: float = HEARD_S) -> list[str]:
    """Return a line for each degradation, once every process of the cell has been heard, or ``heard_s`` are over.

    Reasons are told only with the admin key.
    """
    health = Health(status="unknown")
    with suppress(TimeoutError):  # What is missing is told like the rest.
        async with asyncio.timeout(heard_s), aclosing(told(base_url, admin_key)) as answers:
            async for health in answers:
                if health.status in SERVES and not any(each.what in MEMBERS for each in health.degraded or ()):
                    break
    return [f"Degraded: {line(each)}" for each in health.degraded or ()]
