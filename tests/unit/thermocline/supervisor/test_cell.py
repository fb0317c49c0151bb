"""The choices that turn settings into one cell."""

import socket
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.memory.machine_memory import MachineMemory
from thermocline.supervisor.cell import choose_pools, cpu_data_type, divide_cores, resolve
from thermocline.supervisor.config import BUNDLED_MODEL, PACKAGE_ROOT, SupervisorConfig

MIB, GIB = 2**20, 2**30
BUNDLED = PACKAGE_ROOT / "models" / BUNDLED_MODEL


def sizes(machine: MachineMemory, **settings: Any) -> tuple[int, int, int]:
    """Device pool of each worker, host pool and hidden pool of the bundled model on a machine without GPUs."""
    found = choose_pools(SupervisorConfig(**settings), BUNDLED, machine, sees_gpus=False)
    return found.device_on_cpu, found.host, found.hidden


def test_cores_are_divided_among_workers() -> None:
    """Every worker gets its share, and one thread at least."""
    assert [divide_cores(16, workers) for workers in (1, 2, 3, 32)] == [16, 8, 5, 1]


def test_unset_pools_shrink_to_fit_the_shared_memory() -> None:
    """With 64 MiB of shared memory all device pools take 16 MiB, the host pool 32, and with a disk the hidden pool
    8.
    """
    machine = MachineMemory(64 * GIB, 64 * MIB)

    assert sizes(machine, workers=2) == (8 * MIB, 32 * MIB, 0)
    assert sizes(machine, workers=2, disk_dir=("/d",)) == (8 * MIB, 32 * MIB, 8 * MIB)


def test_unset_pools_have_a_bound() -> None:
    """Plenty of memory does not make the pools huge: eight contexts of the bundled model, and 1 GiB on the host."""
    assert sizes(MachineMemory(1024 * GIB, 1024 * GIB)) == (192 * MIB, GIB, 0)


def test_set_pools_are_taken_as_they_are() -> None:
    """A size that somebody chose is never changed."""
    machine = MachineMemory(64 * GIB, 64 * GIB)

    assert sizes(machine, device_kv_bytes=5 * MIB, host_kv_bytes=7 * MIB) == (5 * MIB, 7 * MIB, 0)
    assert sizes(machine, remote="s3://b", hidden_bytes=3 * MIB)[2] == 3 * MIB
    assert sizes(machine, disk_dir=("/d",), hidden_form="off", hidden_bytes=3 * MIB)[2] == 0


def test_beside_gpus_a_device_pool_takes_no_shared_memory() -> None:
    """It may be larger than all memory of the machine, wherever --device leaves room for a GPU."""
    machine = MachineMemory(16 * GIB, 8 * GIB)

    def host(sees_gpus: bool, **settings: Any) -> int:
        config = SupervisorConfig(device_kv_bytes=100 * GIB, **settings)
        return choose_pools(config, BUNDLED, machine, sees_gpus=sees_gpus).host

    assert host(sees_gpus=True) == host(sees_gpus=False, device="cuda") == 7 * GIB
    for settings in ({"device": "cpu"}, {"device": "auto"}, {}):
        with pytest.raises(ConfigError, match="--device-kv-bytes"):
            host(sees_gpus=False, **settings)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The message names the flag that helps."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} .*--port"):
            resolve(SupervisorConfig(port=port), tmp_path)
        with pytest.raises(ConfigError, match="--nats-port"):
            resolve(SupervisorConfig(port=0, nats_port=port), tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A wrong --model is found before anything starts."""
    with pytest.raises(ConfigError, match="is not the folder of a model"):
        resolve(SupervisorConfig(model=str(tmp_path), port=0), tmp_path)


def test_pools_that_do_not_fit_are_refused_with_figures(tmp_path: Path) -> None:
    """Pools larger than memory are found before anything starts."""
    config = SupervisorConfig(port=0, host_kv_bytes=1 << 50)

    with pytest.raises(ConfigError, match=r"need \d+ MiB of shared memory and /dev/shm has \d+ MiB free, the machine"):
        resolve(config, tmp_path)
    with pytest.raises(ConfigError, match="--hidden-bytes"):
        resolve(SupervisorConfig(port=0, disk_dir=("/d",), hidden_bytes=1 << 50), tmp_path)


def test_free_ports_and_a_temporary_folder_are_chosen(tmp_path: Path) -> None:
    """Port 0 and no data folder leave the choice to the supervisor."""
    cell = resolve(SupervisorConfig(port=0), tmp_path)

    assert cell.port > 0
    assert cell.nats_urls == (f"nats://127.0.0.1:{cell.nats_port}",)
    assert cell.data_dir == tmp_path / cell.shm_prefix
    assert cell.data_dir_is_temporary


def test_an_external_broker_is_used_as_named(tmp_path: Path) -> None:
    """With --nats no broker of our own is planned."""
    cell = resolve(SupervisorConfig(port=0, nats=("nats://broker:4222",)), tmp_path)

    assert (cell.nats_port, cell.nats_urls) == (0, ("nats://broker:4222",))


@pytest.mark.parametrize(
    ("config", "address"),
    [
        (SupervisorConfig(port=0, host="0.0.0.0"), "http://127.0.0.1"),
        (SupervisorConfig(port=0, host="127.0.0.1"), "http://127.0.0.1"),
        (SupervisorConfig(port=0, host="[::1]"), "http://[::1]"),
        (SupervisorConfig(port=0, tls_cert="a.pem", tls_key="b.pem"), "https://127.0.0.1"),
    ],
)
def test_the_base_url_is_reachable_from_here(tmp_path: Path, config: SupervisorConfig, address: str) -> None:
    """A wildcard address is no address to connect to; with a certificate it is https."""
    cell = resolve(config, tmp_path)

    assert cell.base_url == f"{address}:{cell.port}"


def test_the_bundled_model_runs_in_float32_on_a_cpu() -> None:
    """Any other model has its checkpoint's own type."""
    assert cpu_data_type(BUNDLED) == "float32"
    assert cpu_data_type(Path("/models/other")) == "auto"
