"""What is asked of cells, with which mover and profile, and with which mechanisms switched off. Pure.

Lengths are those of Strata's Table 1, and numbers of documents and questions what there is time for. What the scheduler
decides is switched in a running cell: its settings are an input like any other. The mover and the profile are the
worker's, which reads them when it starts: each of those is a cell of its own, a :class:`Setup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.messages.cell_events import CellConfig

PLAIN = CellConfig(disk_writes="off", hidden_form="off")
"""The defaults, without a disk: what is written there is measured apart."""

MECHANISMS: dict[str, dict[str, Any]] = {
    "all on": {},
    "no host tier": {"host_tier": False},
    "no deferral": {"defer_tokens": 0},
    "no bubble filling": {"bubble_filling": False},
    "longest prefix first": {"schedule": "lpm"},
    "first come first served": {"schedule": "fcfs"},
    "first come, no deferral, no bubbles": {"schedule": "fcfs", "defer_tokens": 0, "bubble_filling": False},
    "batches of 8,192 tokens": {"max_batch_tokens": 8192},
}
"""Changes of ``PLAIN`` by name."""

DOCUMENT_TOKENS = 21_613  # LooGLE's, on average.
CHAT_TURNS = 2.5


@dataclass(frozen=True, slots=True)
class Load:
    """One workload of ``thermocline load``, as its command line names it. ``requests`` of them are sent."""

    name: str
    workload: str
    requests: int
    settings: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 16

    @property
    def arguments(self) -> list[str]:
        chosen = [f"{key}={value}" for key, value in self.settings.items()]
        flags = [part for each in chosen for part in ("--set", each)]
        return [
            *("--workload", self.workload, "--requests", str(self.requests)),
            *("--concurrency", str(self.concurrency), *flags),
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a load under a configuration."""

    load: Load
    mechanism: str

    @property
    def name(self) -> str:
        return f"{self.load.name}, {self.mechanism}"

    @property
    def config(self) -> CellConfig:
        return msgspec.structs.replace(PLAIN, **MECHANISMS[self.mechanism])


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked: ``contexts`` documents, ``queries`` about all of them, and ``turns`` of conversations."""

    contexts: int
    queries: int
    turns: int


def calibrated(cold_s: float, warm_s: float, case_s: float) -> Scale:
    """As much as takes about ``case_s`` where a document of average length takes ``cold_s`` the first time and
    ``warm_s`` when it is known. Half of the questions may have to compute their document anew, where there is no host
    tier.
    """
    contexts = max(3, min(10, int(case_s / 3 / max(cold_s, 1e-9))))
    query_s = (cold_s + warm_s) / 2
    queries = contexts + max(contexts, min(96, int((case_s - contexts * cold_s) / max(query_s, 1e-9))))
    return Scale(contexts, queries, max(16, min(192, 4 * queries)))


def loads(scale: Scale) -> dict[str, Load]:
    """LooGLE-like, ReviewMT-like and ShareGPT-like requests."""
    documents = {"contexts": scale.contexts, "queries": scale.queries}
    queries = max(scale.contexts, scale.queries // 2)
    reviews = {"dataset": "reviewmt", "contexts": scale.contexts, "queries": queries}
    return {
        "loogle": Load("loogle", "documents", scale.queries, documents),
        "reviewmt": Load("reviewmt", "documents", queries, reviews),
        # People think for a second where the paper has them think for 60: there is no time for more.
        "sharegpt": Load("sharegpt", "chat", scale.turns, {"turns": CHAT_TURNS, "think_s": 1}, concurrency=32),
    }


@dataclass(frozen=True, slots=True)
class Setup:
    """One start of a cell. ``mover`` is the worker's; with ``has_profile`` the machine is measured first."""

    name: str
    mover: str
    has_profile: bool
    cases: tuple[Case, ...]


def setups(scale: Scale, *, has_gpu: bool) -> list[Setup]:
    """The most telling first: three workloads with batched copies, without the host tier and with it; by the
    GPU-assisted mover; as the profile chooses. Then single mechanisms, and the first case again, which shows what the
    machine's drift is. Without a GPU per-page copies stand in for the GPU-assisted mover.
    """
    known = loads(scale)

    def of(mechanism: str, *names: str) -> tuple[Case, ...]:
        return tuple(Case(known[name], mechanism) for name in names)

    mechanisms = (
        "first come, no deferral, no bubbles", "no deferral", "first come first served", "no bubble filling",
        "longest prefix first", "batches of 8,192 tokens",
    )  # fmt: skip
    single = tuple(Case(known["loogle"], name) for name in mechanisms)
    plain = of("all on", *known)
    both = tuple(case for name in known for case in (*of("all on", name), *of("no host tier", name)))
    assisted = "gpu_assisted" if has_gpu else "per_page"
    return [
        Setup("batched", "batched", has_profile=False, cases=both),
        Setup(assisted.replace("_", "-"), assisted, has_profile=False, cases=plain),
        Setup("profiled", "auto", has_profile=True, cases=(*plain, *single, plain[0])),
    ]
