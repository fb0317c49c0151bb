"""Targets of outputs: the subject that an output is published on, and the key under which its number counts."""

from __future__ import annotations

from typing import NamedTuple

from shared import subjects
from shared.codec import Published
from shared.messages.gateway_notices import GatewayNotice
from shared.messages.worker_plans import WorkerPlan


class Target(NamedTuple):
    """A sequence of numbered outputs, which counts from 1. A gateway's incarnation is ""."""

    subject: str
    incarnation: str

    def __str__(self) -> str:
        """Return the subject, and the incarnation in parentheses where there is one."""
        return f"{self.subject} ({self.incarnation})" if self.incarnation else self.subject


def target_of(output: Published) -> Target:
    """Return the target of an output."""
    if isinstance(output, WorkerPlan):
        return Target(subjects.worker_output(output.worker_id), output.incarnation)
    if isinstance(output, GatewayNotice):
        return Target(subjects.gateway_output(output.gateway_id), "")
    return Target(subjects.storage_output(output.storage_id), output.incarnation)
