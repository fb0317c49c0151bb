"""What the reference page of metrics says of each, found in the modules that declare them."""

from __future__ import annotations

import importlib

from prometheus_client.metrics import MetricWrapperBase

from shared.metrics import FACTS, MetricFacts

COMMON = ("shared.bus.measures",)

PROCESSES: dict[str, tuple[str, ...]] = {
    "gateway": (
        "services.gateway.metrics",
        "services.gateway.tenant_metrics",
        "services.gateway.turns.measures",
        "services.gateway.known_texts.measures",
    ),
    "router": ("services.gateway.router.metrics",),
    "scheduler": ("services.scheduler.cell_metrics", "services.scheduler.cell_families"),
    "worker": ("services.worker.metrics",),
    "storage": ("services.storage.measures",),
}
"""Modules whose metrics a process exports beside the common ones."""

LISTENING = "services.gateway.listening_metrics"
"""What those processes export beside it that serve an API."""
_LISTENERS = ("gateway", "router")

UNITS = ("seconds", "bytes", "tokens", "pages", "chunks", "requests", "rows", "layers", "keys")

_UNITS_OF = {"thermocline_prefix_cache_queries": "tokens", "thermocline_prefix_cache_hits": "tokens"}
"""Names of the field that do not say what they count."""


def declared_in(module: str) -> list[MetricFacts]:
    """The metrics that a module declares, in its order; imports it."""
    loaded = importlib.import_module(module)
    names: dict[str, None] = {}
    for value in vars(loaded).values():
        if isinstance(value, MetricWrapperBase):
            names.update((family.name, None) for family in value.describe())
        elif isinstance(value, MetricFacts):
            names[value.name] = None
        elif isinstance(value, list):
            names.update((row[0].name, None) for row in value if _begins_with_facts(row))
    return [FACTS[name] for name in names]


def exported_by(process: str) -> dict[str, MetricFacts]:
    """All metrics of a process by name."""
    listening = (LISTENING,) if process in _LISTENERS else ()
    modules = (*PROCESSES[process], *listening, *COMMON)
    return {facts.name: facts for module in modules for facts in declared_in(module)}


def unit_of(facts: MetricFacts) -> str:
    """The unit as the name says it; what has none is a number of things, or a ratio."""
    if facts.name in _UNITS_OF:
        return _UNITS_OF[facts.name]
    words = facts.name.split("_")
    found = [unit for unit in UNITS if unit in words]
    if facts.name.endswith(("_ratio", "_perc", "_bias", "_error")):
        return "ratio"
    return found[-1] if found else "count"


def _begins_with_facts(row: object) -> bool:
    return isinstance(row, tuple) and bool(row) and isinstance(row[0], MetricFacts)
