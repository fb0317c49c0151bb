"""Workloads of simulated cells: a recorded trace, or one of the seeded generators, one per file."""

from thermocline.simulate.workloads.asked import Asked, Workload
from thermocline.simulate.workloads.registry import WORKLOADS, make_workload
from thermocline.simulate.workloads.trace import TraceWorkload

__all__ = ["WORKLOADS", "Asked", "TraceWorkload", "Workload", "make_workload"]
