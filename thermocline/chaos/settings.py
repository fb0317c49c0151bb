"""Settings of one run of ``thermocline chaos``, and of its small cell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from thermocline.chaos.plan import PAUSE_S
from thermocline.supervisor.config import SupervisorConfig, bundled_model

HEARTBEAT_LOST_S = 3.0

_FLAGS = {"max_in_flight": "concurrency", "round_faults": "round"}

SERVICE_ENVIRONMENT = {
    # Sooner than by default, so that a run of minutes sees many take-overs and many snapshots.
    "THERMOCLINE_HEARTBEAT_LOST_MS": str(int(HEARTBEAT_LOST_S * 1000)),
    "THERMOCLINE_SNAPSHOT_EVERY_INPUTS": "500",
    "THERMOCLINE_SNAPSHOT_EVERY_MS": "5000",
    # The scheduler checks its invariants.
    "THERMOCLINE_CHECK_INVARIANTS_EVERY": "25",
    # A gateway that was stopped for a while soon notices which tokens it lacks.
    "THERMOCLINE_PROBE_MS": "2000",
    # A stream may wait for as long as workers take to start, which on busy cores is minutes. Clients
    # themselves report a request that waits for longer than their patience.
    "THERMOCLINE_IDLE_TIMEOUT_MS": "600000",
}


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """One run; ConfigError for invalid values. 0 ``faults`` are steady load without faults for ``minutes``."""

    seed: int = 1
    faults: int = 60
    minutes: float | None = None
    workers: int = 2
    schedulers: int = 1
    requests_per_s: float = 4.0
    max_in_flight: int = 16
    pause_s: float = PAUSE_S
    round_faults: int = 50
    questions: int = 64
    model: str = ""

    def __post_init__(self) -> None:
        """Check the bounds, and name all faults in one ConfigError."""
        faults = [
            f"--{_FLAGS.get(name, name.replace('_', '-'))} must be at least {least}"
            for name, least in (
                ("faults", 0),
                ("workers", 1),
                ("schedulers", 1),
                ("max_in_flight", 1),
                ("round_faults", 1),
                ("questions", 4),
            )
            if getattr(self, name) < least
        ]
        if self.requests_per_s <= 0 or self.pause_s <= 0:
            faults.append("--requests-per-s and --pause must be above 0")
        if self.minutes is not None and self.minutes <= 0:
            faults.append("--minutes must be above 0")
        if not self.faults and self.minutes is None:
            faults.append("--faults 0 needs --minutes: nothing else ends the run")
        if faults:
            raise ConfigError("; ".join(faults))

    def cell(self, folder: Path) -> SupervisorConfig:
        """Return a configuration whose pools are far too small for the load, so that all tiers are busy."""
        return SupervisorConfig(
            model=self.model or str(bundled_model() or ""),
            port=0,
            workers=self.workers,
            schedulers=self.schedulers,
            threads=1,
            device="cpu",  # Answers are compared token for token.
            page_size=16,
            device_kv_bytes=12 * 2**20,  # 128 pages of the bundled model: 2,048 tokens.
            host_kv_bytes=24 * 2**20,
            disk_dir=(str(folder / "disk"),),
            disk_kv_bytes=64 * 2**20,
            hidden_bytes=16 * 2**20,
            max_batch_tokens=256,
            data_dir=str(folder),
            grace_s=8.0,
        )
