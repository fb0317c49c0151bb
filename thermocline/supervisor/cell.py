"""One cell on this machine with resolved settings: addresses, folders, sizes, threads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.checks import driver_shows_gpus
from shared.errors import ConfigError, OperatorError
from shared.memory.machine_memory import MachineMemory, machine_memory
from shared.memory.pool_sizes import ChosenSizes, Node, PoolSizes, choose_sizes
from shared.model_folder import check_model, find_model
from thermocline.broker.passwords import OPERATOR, new_password
from thermocline.supervisor import ports
from thermocline.supervisor.config import SupervisorConfig, bundled_model
from thermocline.supervisor.model_demand import demand_of

STORAGE_ID = "storage"

WATCHER = "supervisor"
"""The broker's user of the supervisor itself, which may only ask for the broker's health."""

_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = {"0.0.0.0": _LOOPBACK, "::": "::1"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    ``nats_port`` is 0 with an external broker. ``cpu_kv_bytes`` and ``cpu_dtype`` are each worker's defaults on a CPU:
    only the worker finds out where it runs.
    """

    config: SupervisorConfig
    model: Path
    host: str
    port: int
    nats_port: int
    nats_urls: tuple[str, ...]
    data_dir: Path
    data_dir_is_temporary: bool
    shm_prefix: str
    cpu_kv_bytes: int
    host_kv_bytes: int
    threads: int
    hidden_bytes: int = 0
    cpu_dtype: str = "auto"
    config_file: Path | None = None
    admin_key: str = field(default="", repr=False)
    """The gateway's key, drawn for this run; "" where the operator has set keys or others reach the gateway."""

    broker_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords by user of the embedded broker, drawn for this run; empty with an external broker."""

    @property
    def operator_urls(self) -> tuple[str, ...]:
        """The broker's addresses for the operator's commands. Those of an embedded one contain a password."""
        password = self.broker_passwords.get(OPERATOR)
        if password is None:
            return self.nats_urls
        return tuple(url.replace("://", f"://{OPERATOR}:{password}@") for url in self.nats_urls)

    @property
    def base_url(self) -> str:
        """The gateway's address for clients on this machine."""
        scheme = "https" if self.config.tls_cert else "http"
        host = _ANY_ADDRESS.get(self.host, self.host)
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def data_dir_flag(self) -> str:
        """The data folder behind what chose its place, for messages: ``--data-dir /data``."""
        return f"{'TMPDIR' if self.data_dir_is_temporary else '--data-dir'} {self.data_dir}"

    @property
    def logs(self) -> Path:
        """Folder with one log file per process."""
        return self.data_dir / "logs"


def worker_ids(config: SupervisorConfig) -> list[str]:
    """Return the ids of the workers, which are also the names of their processes."""
    return [f"worker-{number}" for number in range(config.workers)]


def divide_cores(cores: int, workers: int) -> int:
    """Return the threads of each worker, at least one."""
    return max(1, cores // workers)


def cpu_data_type(model: Path) -> str:
    """Return the data type of weights and KV on a CPU by default; "auto" is the checkpoint's own.

    The bundled model is so small that float32 costs nothing; with it a continuation that is recomputed after the death
    of a worker equals the lost one. In bfloat16 the two may round differently.
    """
    return "float32" if model == bundled_model() else "auto"


def node_of(config: SupervisorConfig, sees_gpus: bool) -> Node:
    """Return the workers and tiers that share this machine's memory."""
    return Node(
        workers=config.workers,
        ranks=config.tensor_parallel or 1,
        is_on_cpu=None if config.device in (None, "auto") else config.device == "cpu",
        sees_gpus=sees_gpus,
        has_lower_tiers=bool(config.disk_dir or config.remote),
    )


def choose_pools(config: SupervisorConfig, model: Path, machine: MachineMemory, *, sees_gpus: bool) -> ChosenSizes:
    """Return the sizes of all pools of this node, given or chosen. Raises ConfigError where they do not fit."""
    hidden = 0 if config.hidden_form == "off" else config.hidden_bytes
    asked = PoolSizes(config.device_kv_bytes, config.host_kv_bytes, hidden)
    dtype = config.dtype if config.dtype not in (None, "auto") else cpu_data_type(model)
    demand = demand_of(model, dtype, config.kv_dtype or "auto")
    return choose_sizes(asked, machine, demand, node_of(config, sees_gpus))


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve(
    config: SupervisorConfig,
    runs: Path,
    *,
    config_file: Path | None = None,
    more_faults: Callable[[Cell], Iterable[str]] = lambda cell: (),
) -> Cell:
    """Resolve the settings, with all checks that are possible before the start.

    Raises ConfigError with all faults and ``more_faults`` of the cell: no model, one that cannot be served, a port in
    use, too little memory.
    """
    faults: list[str] = []
    model = find_model(config.model).resolve() if config.model else bundled_model()
    if model is None:
        raise ConfigError("there is no bundled model here; name one with --model DIR")
    try:
        check_model(model)
    except OperatorError as error:
        faults.append(error.message)
    # Two free ports from the system differ, so only given ones are compared below.
    wanted = [(config.host, config.port, "--port")]
    if not config.nats:
        wanted.append((_LOOPBACK, config.nats_port, "--nats-port"))
    for host, port, flag in wanted:
        try:
            if port:
                ports.require_free(host, port, flag)
        except ConfigError as error:
            faults.append(error.message)
    if config.port and config.port == config.nats_port and not config.nats:
        faults.append(f"--port and --nats-port are both {config.port}")
    pools = ChosenSizes(0, 0, 0)
    try:
        pools = choose_pools(config, model, machine_memory(), sees_gpus=driver_shows_gpus())
    except ConfigError as error:
        faults.append(error.message)
    shm_prefix = f"tc-{os.getpid()}-{secrets.token_hex(3)}"
    nats_port = 0 if config.nats else config.nats_port or ports.free_port(_LOOPBACK)
    users = [OPERATOR, WATCHER, "gateway", "scheduler", STORAGE_ID, *worker_ids(config)]  # Schedulers share one.
    cell = Cell(
        config=config,
        model=model,
        host=config.host,
        port=config.port or ports.free_port(_ANY_ADDRESS.get(config.host, config.host)),
        nats_port=nats_port,
        nats_urls=config.nats or (f"nats://{_LOOPBACK}:{nats_port}",),
        data_dir=Path(config.data_dir).expanduser().resolve() if config.data_dir else runs / shm_prefix,
        data_dir_is_temporary=not config.data_dir,
        shm_prefix=shm_prefix,
        cpu_kv_bytes=pools.device_on_cpu,
        host_kv_bytes=pools.host,
        hidden_bytes=pools.hidden,
        threads=config.threads or divide_cores(usable_cores(), config.workers),
        cpu_dtype=cpu_data_type(model),
        config_file=config_file,
        broker_passwords={} if config.nats else {name: new_password() for name in users},
    )
    # Faults that services find again are reported once.
    faults += [each for each in more_faults(cell) if not each.endswith(tuple(faults))]
    if faults:
        raise ConfigError.of(faults)
    return cell
