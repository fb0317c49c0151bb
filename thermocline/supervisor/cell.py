"""One cell on this machine, with every open choice of the settings made: addresses, folders, sizes, threads."""

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

_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = {"0.0.0.0": _LOOPBACK, "::": "::1", "": _LOOPBACK}


@dataclass(frozen=True, slots=True)
class Cell:
    """``nats_port`` is 0 when the broker is somebody else's. ``cpu_kv_bytes`` and ``cpu_dtype`` are what each worker
    takes on a CPU where the settings leave it open: where it runs is the worker's finding.
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
    """Of the gateway, drawn for this run where it needs none of the operator's."""

    broker_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By user of the embedded broker, drawn for this run; empty when the broker is somebody else's."""

    @property
    def operator_urls(self) -> tuple[str, ...]:
        """The broker's addresses for commands that look into this cell. Those of an embedded one hold a secret."""
        password = self.broker_passwords.get(OPERATOR)
        if password is None:
            return self.nats_urls
        return tuple(url.replace("://", f"://{OPERATOR}:{password}@") for url in self.nats_urls)

    @property
    def base_url(self) -> str:
        """Where this machine reaches the gateway."""
        scheme = "https" if self.config.tls_cert else "http"
        host = _ANY_ADDRESS.get(self.host, self.host)
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"


def worker_ids(config: SupervisorConfig) -> list[str]:
    return [f"worker-{number}" for number in range(config.workers)]


def broker_users(config: SupervisorConfig) -> list[str]:
    """Names of the embedded broker's users; schedulers share one."""
    return [OPERATOR, "gateway", "scheduler", STORAGE_ID, *worker_ids(config)]


def divide_cores(cores: int, workers: int) -> int:
    """Threads of each worker; one at least."""
    return max(1, cores // workers)


def cpu_data_type(model: Path) -> str:
    """Return the data type of weights and KV on a CPU by default; "auto" is the checkpoint's own.

    The bundled model is so small that float32 costs nothing, and with it a continuation that is computed anew,
    after a worker died, equals the one that was lost. In bfloat16 the two may round differently.
    """
    return "float32" if model == bundled_model() else "auto"


def node_of(config: SupervisorConfig, sees_gpus: bool) -> Node:
    """Who shares this machine's memory."""
    return Node(
        workers=config.workers,
        ranks=config.tensor_parallel or 1,
        is_on_cpu=None if config.device in (None, "auto") else config.device == "cpu",
        sees_gpus=sees_gpus,
        has_lower_tiers=bool(config.disk_dir or config.remote),
    )


def choose_pools(config: SupervisorConfig, model: Path, machine: MachineMemory, *, sees_gpus: bool) -> ChosenSizes:
    """Sizes of all pools of this node, those that are set and those that are not. Raises ConfigError."""
    hidden = 0 if config.hidden_form == "off" else config.hidden_bytes
    asked = PoolSizes(config.device_kv_bytes, config.host_kv_bytes, hidden)
    dtype = config.dtype if config.dtype not in (None, "auto") else cpu_data_type(model)
    demand = demand_of(model, dtype, config.kv_dtype or "auto")
    return choose_sizes(asked, machine, demand, node_of(config, sees_gpus))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve(
    config: SupervisorConfig,
    runs: Path,
    *,
    config_file: Path | None = None,
    more_faults: Callable[[Cell], Iterable[str]] = lambda cell: (),
) -> Cell:
    """Make every choice, and check what can be checked before anything is started.

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
    # Both ports stay unchecked against each other only if the system hands them out, which it does once each.
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
        broker_passwords={} if config.nats else {name: new_password() for name in broker_users(config)},
    )
    # What services say again of what was found here is told once.
    faults += [each for each in more_faults(cell) if not each.endswith(tuple(faults))]
    if faults:
        raise ConfigError.of(faults)
    return cell
