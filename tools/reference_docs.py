"""Write the pages that follow from code and data: lifecycles from their tables, settings from their structs, and
speed from committed benchmark results.

``python -m tools.reference_docs`` writes them; a test checks that what is committed is what this makes.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import lifecycle as request_lifecycle
from services.scheduler.core.members import drain
from services.storage.config import StorageConfig
from services.storage.core import circuit_breaker, transfer_states
from services.worker import requests as worker_requests
from services.worker.config import WorkerConfig
from shared.config import ENVIRONMENT_PREFIX
from thermocline.supervisor import lifecycle as child_lifecycle
from thermocline.supervisor.config import SupervisorConfig
from tools import (
    core_results,
    data_plane_results,
    failure_results,
    headlines,
    importance_results,
    metric_docs,
    model_support_page,
    papers_pages,
    peer_results,
    policy_results,
    restoration_results,
    speed_results,
    watching_results,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"

LIFECYCLES: tuple[tuple[str, str, Mapping[Any, Any]], ...] = (
    (
        "A request, as the scheduler sees it",
        "services/scheduler/core/lifecycle.py",
        request_lifecycle.TRANSITIONS,
    ),
    (
        "What a waiting request waits for",
        "services/scheduler/core/lifecycle.py",
        request_lifecycle.WAIT_TRANSITIONS,
    ),
    (
        "A transfer, as the scheduler sees it",
        "services/scheduler/core/lifecycle.py",
        request_lifecycle.TRANSFER_TRANSITIONS,
    ),
    ("A worker that was told to end", "services/scheduler/core/members/drain.py", drain.DRAIN_TRANSITIONS),
    ("A request, as its worker sees it", "services/worker/requests.py", worker_requests.TRANSITIONS),
    ("A transfer in storage", "services/storage/core/transfer_states.py", transfer_states.TRANSITIONS),
    (
        "The circuit breaker of an object store",
        "services/storage/core/circuit_breaker.py",
        circuit_breaker.TRANSITIONS,
    ),
    ("A supervised process", "thermocline/supervisor/lifecycle.py", child_lifecycle.TRANSITIONS),
)

SETTINGS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("thermocline up", "up", SupervisorConfig),
    ("thermocline gateway", "gateway", GatewayConfig),
    ("thermocline scheduler", "scheduler", SchedulerConfig),
    ("thermocline worker", "worker", WorkerConfig),
    ("thermocline storage", "storage", StorageConfig),
)


def _name(value: Any) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def lifecycles() -> str:
    """One state diagram per table, in Mermaid."""
    parts = [
        "# Lifecycles\n",
        "Made by `python -m tools.reference_docs` from the transition tables that the code follows. What is not drawn",
        "cannot happen: a missing entry is a typed error (`illegal_transition`).\n",
    ]
    for title, file, table in LIFECYCLES:
        parts += [f"## {title}\n", f"`{file}`\n", "```mermaid", "stateDiagram-v2"]
        arrows: dict[tuple[str, str], list[str]] = {}
        for (state, event), target in table.items():
            arrows.setdefault((_name(state), _name(target)), []).append(_name(event))
        parts += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
        parts += ["```\n"]
    return "\n".join(parts)


def _type_of(kind: Any) -> str:
    """A type as a reader wants it: ``int``, ``text``, ``cpu or cuda``."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = kind.__origin__
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "list"
    options = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    kind = options[0] if options else kind
    return {str: "text", bool: "true or false"}.get(kind, getattr(kind, "__name__", str(kind)))


def _description(kind: Any) -> str:
    if typing.get_origin(kind) is not typing.Annotated:
        return ""
    return next((meta.description or "" for meta in kind.__metadata__ if isinstance(meta, msgspec.Meta)), "")


def _default(field: Any) -> str:
    if field.required:
        return "(required)"
    if field.default in (None, "", ()):
        return ""
    return f"`{', '.join(field.default) if isinstance(field.default, tuple) else field.default}`"


def settings() -> str:
    """One table per command."""
    parts = [
        "# Settings\n",
        "Made by `python -m tools.reference_docs`. A setting comes from a TOML file (`--config FILE`, table",
        f"`[section]`), an environment variable (`{ENVIRONMENT_PREFIX}<NAME>` in capitals) or a flag; later ones win.",
        "Sizes in bytes may be written `64MiB`. Every fault is reported at once, with exit code 2.\n",
    ]
    for command, section, kind in SETTINGS:
        parts += [
            f"## `{command}`, section `[{section}]`\n",
            "| flag | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in msgspec.structs.fields(kind):
            flag = "--" + field.name.replace("_", "-")
            row = (f"`{flag}`", _type_of(field.type), _default(field), _description(field.type))
            parts.append("| " + " | ".join(row) + " |")
        parts.append("")
    return "\n".join(parts)


def _result(name: str) -> tuple[dict[str, Any], str]:
    """A committed result, and the line that says what it was measured on and how."""
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    hardware = document["hardware"]
    origin = (
        f"`{document['command']}`, commit {document['commit']}, {document['date']}, {hardware['processor']}, "
        f"{hardware['cores']} cores, {hardware['memory_gib']} GiB"
    )
    results: dict[str, Any] = document["results"]
    return results, origin


def _results(names: Iterable[str]) -> dict[str, tuple[dict[str, Any], str]]:
    """Those of them that have been measured."""
    return {name: _result(name) for name in names if (RESULTS / f"{name}.json").exists()}


def speed() -> str:
    """The engine and the server by themselves."""
    return speed_results.page(_results(speed_results.NAMES))


def policies() -> str:
    """Hit ratios of all eviction policies."""
    limits, _ = _result("policy_limits")
    judges, _ = _result("policy_judges")
    return policy_results.page(*_result("policy_hit_ratio"), limits["by_blocks"], judges["judges"])


def core() -> str:
    """Speed and size of the scheduler's core."""
    return core_results.page(*_result("core_speed"))


def data_plane() -> str:
    """TTFT by tier, disk and movers."""
    return data_plane_results.page(_result("ttft_ladder"), _result("disk_tier"), _result("transfers"))


def restoration() -> str:
    """What restoration costs and saves."""
    return restoration_results.page(_result("restoration"), _result("hidden_states"), _result("hidden_saving"))


def failures() -> str:
    """What failures and changes of size do to a cell."""
    names = ("chaos", "take_over", "worker_loss", "broker_loss", "scaling", "simulated_faults", "chaos_soak")
    return failure_results.page(_results(names))


def watching() -> str:
    """What watching costs, how true explanations are, and what tenants can find out."""
    names = ("observability_cost", "metric_calls", "explain_sums", "tenant_timing", "fuzz")
    return watching_results.page(_results(names))


def peers() -> str:
    """Ours beside other servers."""
    engine = [figures for figures, _ in _results(("engine_speed_bfloat16",)).values()]
    return peer_results.page(peer_results.read(RESULTS), *engine)


def importance_serving() -> str:
    """What loading less brings."""
    return importance_results.page(_result("importance_serving"), _result("importance_serving_5"))


def models() -> str:
    """Which model types are served."""
    return model_support_page.page(*_result("model_support"))


PAGES = {
    "reference/lifecycles.md": lifecycles,
    "reference/metrics.md": metric_docs.page,
    "reference/models.md": models,
    "reference/settings.md": settings,
    "results/core.md": core,
    "results/data-plane.md": data_plane,
    "results/failures.md": failures,
    "results/headlines.md": headlines.page,
    "results/importance-serving.md": importance_serving,
    "results/peers.md": peers,
    "results/policies.md": policies,
    "results/restoration.md": restoration,
    "results/speed.md": speed,
    "results/watching.md": watching,
    **papers_pages.PAGES,
}


def main() -> None:
    """Write every page, and the figures in the README."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    headlines.README.write_text(headlines.readme(headlines.README.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
