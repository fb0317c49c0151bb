"""Which processes a cell consists of and with which flags each is started. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.broker import PASSWORD_VARIABLE
from shared.config import ENVIRONMENT_PREFIX
from shared.quality_gate import UNMEASURED
from thermocline.supervisor.cell import STORAGE_ID, Cell, worker_ids
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.config import PACKAGE_ROOT, to_flags

# The order of the shutdown: first what takes new work, last what all others talk through.
STAGES = {"gateway": 0, "worker": 1, "storage": 2, "scheduler": 3, "nats": 4}

ADMIN_KEY_VARIABLE = ENVIRONMENT_PREFIX + "ADMIN_KEY"
TOKEN_FILE_VARIABLE = ENVIRONMENT_PREFIX + "NATS_TOKEN_FILE"
PASSWORD_FILE_VARIABLE = ENVIRONMENT_PREFIX + "NATS_PASSWORD_FILE"
CREDENTIALS_VARIABLE = ENVIRONMENT_PREFIX + "NATS_CREDENTIALS"

NATS_ENVIRONMENT = {"GOGC": "50"}
"""The broker collects its garbage at one and a half times what it uses, and not at twice. Nearly all of that is blocks
of streams, of up to 8 MiB each, which cost nothing to look through: the collector runs a few times a minute.
"""

FLAGS_FROM = 4
"""Where a service's flags begin in its command line: behind the interpreter, -P, -m and the module."""

Settings = Mapping[str, Any]


def nats_child(cell: Cell, program: Path, config_file: Path) -> ChildSpec:
    """Return the embedded broker. It has no exit code for refusals: Go programs exit with 2 when they crash.

    What our own environment says of Go's collector is the operator's choice, and stays.
    """
    return ChildSpec(
        name="nats",
        argv=(str(program), "--config", str(config_file)),
        log=cell.logs / "nats.log",
        stage=STAGES["nats"],
        env={name: value for name, value in NATS_ENVIRONMENT.items() if name not in os.environ},
        refusal_code=None,
    )


def service_children(cell: Cell, environ: Mapping[str, str] | None = None) -> tuple[ChildSpec, ...]:
    """Schedulers, storage, workers and gateway, in the order in which they are started."""
    environment = dict(os.environ) if environ is None else dict(environ)
    config = cell.config
    common: Settings = {
        "nats": cell.nats_urls,
        "log_level": config.log_level.lower(),
        "config": cell.config_file,
        "traces": config.traces,
    }
    # What runs may end within the time that the supervisor waits, less what closing takes.
    grace_ms = max(1, int(config.grace_s * 800))
    # Digests of weight files; what one process has read through the others need not.
    digests = cell.data_dir / "models"
    scheduler: Settings = {
        **common,
        "prefix_caching": config.prefix_caching,
        "policy": config.policy,
        "hidden_form": config.hidden_form,
        "restoring": config.restoring,
        "max_batch_tokens": config.max_batch_tokens,
        "max_running": config.max_running,
        "max_queued": config.max_queued,
        "stream_replicas": config.stream_replicas,
    }
    storage: Settings = {
        **common,
        "id": STORAGE_ID,
        "shm_prefix": cell.shm_prefix,
        "host_kv_bytes": cell.host_kv_bytes,
        "disk_dir": tuple(str(Path(path).expanduser().resolve()) for path in config.disk_dir),
        # A disk of the settings file's [storage] is not known here, and its hidden pool is that section's business.
        "hidden_bytes": cell.hidden_bytes or config.hidden_bytes,
        "disk_kv_bytes": config.disk_kv_bytes,
        "disk_read_bytes_per_s": config.disk_read_bytes_per_s,
        "remote": config.remote,
        "sparse": config.sparse,
        "handover_ms": min(5_000, grace_ms // 2),
    }
    worker: Settings = {
        **common,
        "data_dir": digests,
        "model": cell.model,
        "page_size": config.page_size,
        "max_context_tokens": config.max_context_tokens,
        "exact": config.exact,
        "kv_dtype": config.kv_dtype,
        "device_kv_bytes": config.device_kv_bytes,
        "cpu_kv_bytes": cell.cpu_kv_bytes,
        "device_memory_fraction": config.device_memory_fraction,
        "max_batch_tokens": config.max_batch_tokens,
        "node_workers": config.workers,
        "shm_prefix": cell.shm_prefix,
        "threads": cell.threads,
        "tensor_parallel": config.tensor_parallel,
        "dtype": config.dtype,
        "cpu_dtype": cell.cpu_dtype,
        "device": config.device,
        "profile": _absolute(config.profile),
        # It drains first, which seldom takes long, and then finishes its step.
        "drain_timeout_ms": grace_ms // 2,
        "stop_timeout_ms": max(1, grace_ms // 2),
    }
    gateway: Settings = {
        **common,
        "id": "gateway",
        "data_dir": digests,
        "model": cell.model,
        "max_context_tokens": config.max_context_tokens,
        "exact": config.exact,
        "kv_dtype": config.kv_dtype,
        "adapter": tuple(map(_absolute_adapter, config.adapter)),
        "host": cell.host,
        "port": cell.port,
        "tls_cert": _absolute(config.tls_cert),
        "tls_key": _absolute(config.tls_key),
        "kv_gate": config.kv_gate if config.kv_gate == UNMEASURED else _absolute(config.kv_gate),
        "importance": config.importance,
        "importance_gate": _absolute(config.importance_gate),
        "importance_ratio": config.importance_ratio,
        "grace_ms": grace_ms,
        "trace_share": config.trace_share,
    }
    ranks = config.tensor_parallel or 1
    # The first keeps its name however many there are.
    scheduler_ids = ["scheduler", *(f"scheduler-{number}" for number in range(1, config.schedulers))]
    return (
        *(_service(cell, environment, "scheduler", {**scheduler, "id": name}) for name in scheduler_ids),
        _service(cell, environment, "storage", storage),
        *(
            _service(cell, environment, "worker", {**worker, "id": worker_id, "gpu": number * ranks})
            for number, worker_id in enumerate(worker_ids(config))
        ),
        _service(cell, environment, "gateway", gateway),
    )


def service_of(child: ChildSpec) -> str:
    """Which service a child is one of, such as ``worker`` for ``worker-0``."""
    return child.argv[FLAGS_FROM - 1].removeprefix("services.")


def _absolute(path: str) -> str:
    """Return a path that means the same file wherever it is read; "" for none."""
    return str(Path(path).expanduser().resolve()) if path else ""


def _absolute_adapter(given: str) -> str:
    """Return the same for the folder in NAME=DIR."""
    name, equals, path = given.partition("=")
    return f"{name}{equals}{_absolute(path)}"


def _service(cell: Cell, environ: Mapping[str, str], service: str, settings: Settings) -> ChildSpec:
    name = settings["id"]
    user = "scheduler" if service == "scheduler" else name
    threads = cell.threads if service == "worker" else 1
    env = {
        "THERMOCLINE_SUPERVISED": str(os.getpid()),
        # Thread pools read this before any flag is parsed.
        "OMP_NUM_THREADS": str(threads),
        # The tokenizer's own pool would only fight the gateway's event loop for cores.
        "TOKENIZERS_PARALLELISM": "false",
        # Weights lie in a folder; nothing is ever looked up on a hub.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if service == "gateway" and cell.admin_key:
        env[ADMIN_KEY_VARIABLE] = cell.admin_key  # Not a flag, which every process list shows.
    if cell.broker_passwords:
        settings = {**settings, "nats_user": user}
        # What the environment says of another broker's credentials must not be mixed with it.
        env |= {TOKEN_FILE_VARIABLE: "", PASSWORD_FILE_VARIABLE: "", CREDENTIALS_VARIABLE: ""}
        env[PASSWORD_VARIABLE] = cell.broker_passwords[user]
    if (PACKAGE_ROOT / "pyproject.toml").is_file():
        # A checkout works whether or not it is installed.
        earlier = environ.get("PYTHONPATH", "")
        env["PYTHONPATH"] = f"{PACKAGE_ROOT}{os.pathsep}{earlier}" if earlier else str(PACKAGE_ROOT)
    return ChildSpec(
        name=name,
        # -P: a folder called ``services`` where the user happens to stand must not be taken for ours.
        argv=(sys.executable, "-P", "-m", f"services.{service}", *to_flags(settings)),
        log=cell.logs / f"{name}.log",
        stage=STAGES[service],
        env=env,
        tells_phases=True,
    )
