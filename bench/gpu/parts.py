"""The parts of the GPU benchmark, and how the time is divided among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.25
"""A part is ended by force when it takes so many times its share: it was to stop by itself before."""

GRACE_S = 15.0
"""And so much longer, for what no part can foresee."""


@dataclass(frozen=True, slots=True)
class Part:
    """``weight`` is its portion of the time where all parts run; below ``least_s`` it cannot tell anything."""

    name: str
    question: str
    weight: float
    least_s: float


PARTS = (
    Part("correctness", "Do the tests that need a GPU pass, bfloat16 beside oracles first?", 60.0, 20.0),
    Part("tokens", "Are the tokens the same with the cache as without, by default and exactly?", 34.0, 20.0),
    Part("serving", "What does a whole cell serve, by host tier, mover and profile?", 217.0, 90.0),
    Part("movers", "Which mover brings pages to the device, by page size, verified?", 22.0, 12.0),
    Part("interference", "How much does the I/O kernel slow the model?", 12.0, 10.0),
    Part("backup", "How fast do pages go down to the host?", 10.0, 8.0),
    Part("decode", "How near is a decode step to what memory allows?", 24.0, 20.0),
    Part("prefill", "How near is a prompt to what the tensor cores allow?", 14.0, 12.0),
    Part("exact", "What does exact mode cost, in products, prefills and decode steps?", 14.0, 12.0),
    Part("attention", "How near do our kernels come to PyTorch's, and to the device?", 18.0, 15.0),
    Part("latents", "How near does attention to latents come to memory and tensor cores?", 9.0, 8.0),
    Part("restarts", "Does each process come back, and is the same answered?", 24.0, 20.0),
    Part("ipc", "How fast are pages of a neighbour's device pool?", 9.0, 8.0),
    Part("restoration", "Which way brings a prefix back fastest, with and without grouped heads?", 28.0, 25.0),
    Part("importance", "What does loading only the important part of a prefix cost?", 10.0, 8.0),
)
"""Whether results are right before how fast they come, then the most telling first."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """Seconds of one part: when it should have ended, and when it is made to."""

    share_s: float
    limit_s: float


def allot(part: Part, behind: Sequence[Part], left_s: float) -> Allotment | None:
    """What ``part`` gets of ``left_s`` seconds, where the parts ``behind`` it are still to come; None if that is too
    little. What earlier parts did not use goes to all that are left.
    """
    share_s = left_s * part.weight / (part.weight + sum(each.weight for each in behind))
    if not behind:
        share_s = left_s
    if share_s < part.least_s:
        # What is more telling goes before what would still fit.
        share_s = min(left_s, part.least_s)
    if share_s < part.least_s:
        return None
    return Allotment(share_s, min(left_s, share_s * MARGIN + GRACE_S))
