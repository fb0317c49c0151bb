"""Everything to import for policies, schedules and admissions of your own.

Eviction: subclass :class:`Policy`, or :class:`RankedPolicy` where one number per node decides. Schedules
subclass :class:`Schedule`, and admissions to host memory :class:`Admission`. Each class has a ``name``. Offer it as an
entry point of the group ``thermocline.policies``, or name it in a setting as ``module:Class``.

All schedulers of a cell, and every replay, must decide the same. So such code may not read a clock, draw by
chance, read or write files, or depend on the order of a set, on ``hash()`` or on ``id()``. It mutates itself and
nothing that it is given. :mod:`thermocline.testing` checks what can be checked.
"""

from services.scheduler.core.cache.eviction import Evictable, Hotness, Moment, Policy, Rank, RankedPolicy
from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
from services.scheduler.core.queue.schedules import Schedule
from services.scheduler.core.state import CellState, Worker
from services.scheduler.core.tiers.host_admission import Admission
from shared.errors import CodecError
from shared.messages.cell_events import CellConfig

__all__ = [
    "Admission",
    "BatchBuilder",
    "Candidate",
    "CellConfig",
    "CellState",
    "CodecError",
    "Evictable",
    "Hotness",
    "Moment",
    "Node",
    "Policy",
    "Rank",
    "RankedPolicy",
    "Schedule",
    "Worker",
]
