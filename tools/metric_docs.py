"""The reference page of metrics, made from the modules that declare them."""

from __future__ import annotations

import importlib

from prometheus_client.metrics import MetricWrapperBase

from shared.metrics import FACTS, MetricFacts

COMMON = ("shared.bus.measures",)

PROCESSES: dict[str, tuple[str, ...]] = {
    "gateway": ("services.gateway.metrics", "services.gateway.tenant_metrics"),
    "scheduler": ("services.scheduler.cell_metrics", "services.scheduler.cell_families"),
    "worker": ("services.worker.metrics",),
    "storage": ("services.storage.measures",),
}
"""Modules whose metrics a process exports beside the common ones."""

UNITS = ("seconds", "bytes", "tokens", "pages", "chunks", "requests", "rows", "layers", "keys")

_UNITS_OF = {"thermocline_prefix_cache_queries": "tokens", "thermocline_prefix_cache_hits": "tokens"}
"""Names of the field that do not say what they count."""

_ABOUT = {
    "gateway": "At `/metrics` of the API's own port as far as `--api-metrics` lets, and at `--metrics-port` if that is "
    "set. Tenants are those of the [file of tenants](../how-to/secure.md); everybody else is `other`.",
    "scheduler": "At `--metrics-port`. What is said of the cell comes from the active scheduler's last status, at most "
    "half a second old; a standby exports those families without samples.",
    "worker": "At `--metrics-port`.",
    "storage": "At `--metrics-port`.",
}


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
    modules = (*PROCESSES[process], *COMMON)
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


def page() -> str:
    """docs/reference/metrics.md."""
    parts = [
        "# Metrics\n",
        "Made by `python -m tools.reference_docs` from the code that declares them; a test scrapes a running cell and",
        "compares. [Observe](../how-to/observe.md) says how to collect them, and which to look at.\n",
        "A histogram has the series `_bucket` (with a label `le`), `_sum` and `_count`.\n",
        "## Every process\n",
        *_table([facts for module in COMMON for facts in declared_in(module)]),
    ]
    for process, modules in PROCESSES.items():
        parts += [f"## {process.capitalize()}\n", _ABOUT[process] + "\n"]
        parts += _table([facts for module in modules for facts in declared_in(module)])
    return "\n".join(parts)


def _begins_with_facts(row: object) -> bool:
    return isinstance(row, tuple) and bool(row) and isinstance(row[0], MetricFacts)


def _table(metrics: list[MetricFacts]) -> list[str]:
    rows = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for facts in metrics:
        labels = ", ".join(f"`{label}`" for label in facts.labels)
        rows.append(f"| `{facts.series}` | {facts.kind} | {labels} | {unit_of(facts)} | {facts.documentation} |")
    return [*rows, ""]
