"""The processes of a cell, their command lines, and the settings that these give them."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared import variables
from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE
from shared.config import ENVIRONMENT_PREFIX, from_command_line
from shared.quality_gate import UNMEASURED
from thermocline.supervisor.broker_urls import split_urls
from thermocline.supervisor.cell import STORAGE_ID, Cell, worker_ids
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.child_variables import is_passed
from thermocline.supervisor.config import PACKAGE_ROOT, to_flags

NATS = "nats"
"""Name of the embedded broker among the children."""

# The order of the shutdown: processes that take new work first, the broker last.
STAGES = {"gateway": 0, "worker": 1, "storage": 2, "scheduler": 3, NATS: 4}

ADMIN_KEY_VARIABLE = ENVIRONMENT_PREFIX + "ADMIN_KEY"
USER_VARIABLE = ENVIRONMENT_PREFIX + "NATS_USER"
TOKEN_FILE_VARIABLE = ENVIRONMENT_PREFIX + "NATS_TOKEN_FILE"
PASSWORD_FILE_VARIABLE = ENVIRONMENT_PREFIX + "NATS_PASSWORD_FILE"
CREDENTIALS_VARIABLE = ENVIRONMENT_PREFIX + "NATS_CREDENTIALS"

NATS_ENVIRONMENT = {"GOGC": "50"}
"""The broker collects garbage at 1.5 times its live memory, not at twice. Nearly all of that is blocks of streams of up
to 8 MiB each, which are free to scan: the collector runs a few times a minute.
"""

FLAGS_FROM = 4
"""Index of the first flag in a service's command line, behind the interpreter, -P, -m and the module."""

Settings = Mapping[str, Any]
C = TypeVar("C", bound=msgspec.Struct)


def nats_child(cell: Cell, program: Path, config_file: Path) -> ChildSpec:
    """Return the embedded broker. It has no exit code for refusals: Go programs exit with 2 when they crash.

    Settings of Go's collector in our own environment are the operator's choice, and stay.
    """
    return ChildSpec(
        name=NATS,
        argv=(str(program), "--config", str(config_file)),
        log=cell.logs / "nats.log",
        stage=STAGES[NATS],
        env={
            variables.SUPERVISED: str(os.getpid()),
            **{name: value for name, value in NATS_ENVIRONMENT.items() if name not in os.environ},
        },
        inherits=partial(is_passed, ""),
        refusal_code=None,
    )


def service_children(cell: Cell, environ: Mapping[str, str] | None = None) -> tuple[ChildSpec, ...]:
    """Return schedulers, storage, workers and gateway, in the order of their start."""
    environment = dict(os.environ) if environ is None else dict(environ)
    config = cell.config
    common: Settings = {
        "nats": split_urls(cell.nats_urls).bare,
        "log_level": config.log_level.lower(),
        "config": cell.config_file,
        "traces": config.traces,
    }
    # Requests may end within the time that the supervisor waits, less the time of closing.
    grace_ms = max(1, int(config.grace_s * 800))
    # Digests of weight files are shared, so that only one process reads each file.
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
        # A disk in the settings file's [storage] is not known here; that section sets its hidden pool, too.
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
        # A worker drains first, which is usually quick, and then finishes its step.
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
    # The first keeps its name for any number of them.
    scheduler_ids = ["scheduler", *(f"scheduler-{number}" for number in range(1, config.schedulers))]
    return (
        *(
            _service(cell, environment, "scheduler", {**scheduler, "id": name, **_own_port(cell, "scheduler", number)})
            for number, name in enumerate(scheduler_ids)
        ),
        _service(cell, environment, "storage", storage),
        *(
            _service(
                cell,
                environment,
                "worker",
                {**worker, "id": worker_id, "gpu": number * ranks, **_own_port(cell, "worker", number)},
            )
            for number, worker_id in enumerate(worker_ids(config))
        ),
        _service(cell, environment, "gateway", gateway),
    )


def service_of(child: ChildSpec) -> str:
    """Return a child's service, such as ``worker`` for ``worker-0``."""
    return child.argv[FLAGS_FROM - 1].removeprefix("services.")


def child_settings(kind: type[C], service: str, cell: Cell, environ: Mapping[str, str]) -> C:
    """Return the settings of the first child of ``service``, from its flags, its environment and the settings file.

    Raises ConfigError where they are invalid.
    """
    child = next(child for child in service_children(cell, environ) if service_of(child) == service)
    return from_command_line(kind, service, child.argv[FLAGS_FROM:], environ={**environ, **child.env})


def _own_port(cell: Cell, service: str, number: int) -> Settings:
    """Return the port for metrics of a process whose ``number`` is not 0: so many behind the settings file's.

    Nothing where the file has none, or is faulty, which the first process says.
    """
    if not number or cell.config_file is None:
        return {}
    try:
        port = tomllib.loads(cell.config_file.read_text(encoding="utf-8"))[service]["metrics_port"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"metrics_port": port + number} if isinstance(port, int) and port else {}


def _absolute(path: str) -> str:
    """Return an absolute path with ``~`` expanded; "" for none."""
    return str(Path(path).expanduser().resolve()) if path else ""


def _absolute_adapter(given: str) -> str:
    """Return NAME=DIR with an absolute DIR."""
    name, equals, path = given.partition("=")
    return f"{name}{equals}{_absolute(path)}"


def _service(cell: Cell, environ: Mapping[str, str], service: str, settings: Settings) -> ChildSpec:
    name = settings["id"]
    user = "scheduler" if service == "scheduler" else name
    threads = cell.threads if service == "worker" else 1
    env = {
        variables.SUPERVISED: str(os.getpid()),
        # Thread pools read this before any flag is parsed.
        "OMP_NUM_THREADS": str(threads),
        # The tokenizer's own threads would compete with the gateway's event loop for cores.
        "TOKENIZERS_PARALLELISM": "false",
        # Weights are in a folder; no process may ask a hub.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if service == "gateway" and cell.admin_key:
        env[ADMIN_KEY_VARIABLE] = cell.admin_key  # Not a flag, which process lists show.
    urls = split_urls(cell.nats_urls)
    user, password = (user, cell.broker_passwords[user]) if cell.broker_passwords else (urls.user, urls.password)
    if user or urls.token:
        # Credentials of another broker in the environment must not be mixed with it.
        env |= {TOKEN_FILE_VARIABLE: "", PASSWORD_FILE_VARIABLE: "", CREDENTIALS_VARIABLE: ""}
        # No secret is a flag, which process lists show.
        env |= {PASSWORD_VARIABLE: password, TOKEN_VARIABLE: urls.token}
        if user:
            settings = {**settings, "nats_user": user}
        else:
            env[USER_VARIABLE] = ""
    if (PACKAGE_ROOT / "pyproject.toml").is_file():
        # A checkout works whether or not it is installed.
        earlier = environ.get("PYTHONPATH", "")
        env["PYTHONPATH"] = f"{PACKAGE_ROOT}{os.pathsep}{earlier}" if earlier else str(PACKAGE_ROOT)
    return ChildSpec(
        name=name,
        # -P: a folder ``services`` in the working directory must not shadow ours.
        argv=(sys.executable, "-P", "-m", f"services.{service}", *to_flags(settings)),
        log=cell.logs / f"{name}.log",
        stage=STAGES[service],
        env=env,
        inherits=partial(is_passed, service),
        tells_phases=True,
    )
