"""All generators by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from thermocline.simulate.workloads.agents import AgentOptions, AgentWorkload
from thermocline.simulate.workloads.asked import Workload
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload
from thermocline.simulate.workloads.diurnal import DiurnalOptions, DiurnalWorkload
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload
from thermocline.simulate.workloads.drift import DriftOptions, DriftWorkload
from thermocline.simulate.workloads.few_shot import FewShotOptions, FewShotWorkload
from thermocline.simulate.workloads.retrieval import RetrievalOptions, RetrievalWorkload
from thermocline.simulate.workloads.scans import ScanOptions, ScanWorkload
from thermocline.simulate.workloads.shot_tree import ShotTreeOptions, ShotTreeWorkload
from thermocline.simulate.workloads.tenants import TenantOptions, TenantWorkload

WORKLOADS: dict[str, tuple[type[msgspec.Struct], Callable[[Any, int], Workload]]] = {
    "few-shot": (FewShotOptions, FewShotWorkload),
    "documents": (DocumentOptions, DocumentWorkload),
    "chat": (ChatOptions, ChatWorkload),
    "agents": (AgentOptions, AgentWorkload),
    "diurnal": (DiurnalOptions, DiurnalWorkload),
    "drift": (DriftOptions, DriftWorkload),
    "retrieval": (RetrievalOptions, RetrievalWorkload),
    "scans": (ScanOptions, ScanWorkload),
    "shot-tree": (ShotTreeOptions, ShotTreeWorkload),
    "tenants": (TenantOptions, TenantWorkload),
}
"""By name: the struct of a generator's options, and its factory from them and a seed."""


def make_workload(name: str, options: msgspec.Struct, seed: int) -> Workload:
    """Return a generator with options of its own struct. Raises KeyError for a name that is not in WORKLOADS."""
    _, make = WORKLOADS[name]
    return make(options, seed)
