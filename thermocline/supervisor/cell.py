"""One cell on this machine, with every open choice of the settings made: addresses, folders, sizes, threads."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError
from shared.memory.segment import SHM_DIRECTORY
from thermocline.broker.users import OPERATOR, new_password
from thermocline.supervisor import ports
from thermocline.supervisor.config import SupervisorConfig, bundled_model

DEFAULT_DEVICE_KV_BYTES = 64 * 1024**2
DEFAULT_HOST_KV_BYTES = 1024**3
DEFAULT_STATE_BYTES = 256 * 1024**2

STORAGE_ID = "storage"

_LOOPBACK = "127.0.0.1"
_ANY_ADDRESS = {"0.0.0.0": _LOOPBACK, "::": "::1", "": _LOOPBACK}


@dataclass(frozen=True, slots=True)
class Cell:
    """``nats_port`` is 0 when the broker is somebody else's."""

    config: SupervisorConfig
    model: Path
    host: str
    port: int
    nats_port: int
    nats_urls: tuple[str, ...]
    data_dir: Path
    data_dir_is_temporary: bool
    shm_prefix: str
    device_kv_bytes: int
    host_kv_bytes: int
    threads: int
    state_bytes: int = 0
    dtype: str | None = None
    config_file: Path | None = None
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


def pool_sizes(config: SupervisorConfig, free_bytes: int) -> tuple[int, int, int]:
    """Bytes of each worker's device pool, of the host pool, and of the state pool.

    Sizes that are not set shrink to fit the free shared memory: containers often have only 64 MiB of it. The
    device pools of all workers may take a quarter of it, the host pool half, the state pool an eighth. Without
    anything below host memory there is no state pool.
    """
    device, host, state = config.device_kv_bytes, config.host_kv_bytes, config.state_bytes
    if device is None:
        device = min(DEFAULT_DEVICE_KV_BYTES, free_bytes // 4 // config.workers)
    if host is None:
        host = min(DEFAULT_HOST_KV_BYTES, free_bytes // 2)
    if not (config.disk_dir or config.remote) or config.state_form == "off":
        state = 0
    elif state is None:
        state = min(DEFAULT_STATE_BYTES, free_bytes // 8)
    return device, host, state


def data_type(config: SupervisorConfig, model: Path) -> str | None:
    """The data type of weights and KV; None leaves the checkpoint's own.

    The bundled model is so small that float32 costs nothing, and with it a continuation that is computed anew,
    after a worker died, equals the one that was lost. In bfloat16 the two may round differently.
    """
    if config.dtype is None and model == bundled_model() and config.device != "cuda":
        return "float32"
    return config.dtype


def free_shared_memory() -> int:
    """Free bytes of /dev/shm. Raises ConfigError where there is none."""
    try:
        return shutil.disk_usage(SHM_DIRECTORY).free
    except OSError as error:
        raise ConfigError(f"there is no {SHM_DIRECTORY} on this system: {error}") from error


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve(config: SupervisorConfig, runs: Path, *, config_file: Path | None = None) -> Cell:
    """Make every choice, and check what can be checked before anything is started.

    Raises ConfigError: no model there, a port in use, too little shared memory.
    """
    model = Path(config.model).expanduser().resolve() if config.model else bundled_model()
    if model is None:
        raise ConfigError("there is no bundled model here; name one with --model DIR")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} is not the folder of a model: it has no config.json")
    # Both ports stay unchecked against each other only if the system hands them out, which it does once each.
    if config.port:
        ports.require_free(config.host, config.port, "--port")
    if config.nats_port and not config.nats:
        ports.require_free(_LOOPBACK, config.nats_port, "--nats-port")
    if config.port and config.port == config.nats_port and not config.nats:
        raise ConfigError(f"--port and --nats-port are both {config.port}")
    free_bytes = free_shared_memory()
    device_kv_bytes, host_kv_bytes, state_bytes = pool_sizes(config, free_bytes)
    on_cpu = config.device != "cuda"
    needed = host_kv_bytes + state_bytes + (device_kv_bytes * config.workers if on_cpu else 0)
    if needed > free_bytes:
        raise ConfigError(
            f"the pools need {needed >> 20} MiB of shared memory and /dev/shm has {free_bytes >> 20} MiB free; "
            "lower --device-kv-bytes, --host-kv-bytes or --state-bytes, or enlarge /dev/shm (docker run --shm-size)"
        )
    shm_prefix = f"tc-{os.getpid()}-{secrets.token_hex(3)}"
    nats_port = 0 if config.nats else config.nats_port or ports.any_free(_LOOPBACK)
    return Cell(
        config=config,
        model=model,
        host=config.host,
        port=config.port or ports.any_free(_ANY_ADDRESS.get(config.host, config.host)),
        nats_port=nats_port,
        nats_urls=config.nats or (f"nats://{_LOOPBACK}:{nats_port}",),
        data_dir=Path(config.data_dir).expanduser().resolve() if config.data_dir else runs / shm_prefix,
        data_dir_is_temporary=not config.data_dir,
        shm_prefix=shm_prefix,
        device_kv_bytes=device_kv_bytes,
        host_kv_bytes=host_kv_bytes,
        state_bytes=state_bytes,
        threads=config.threads or divide_cores(usable_cores(), config.workers),
        dtype=data_type(config, model),
        config_file=config_file,
        broker_passwords={} if config.nats else {name: new_password() for name in broker_users(config)},
    )
