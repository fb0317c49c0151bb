"""The processes of a cell and their flags."""

import importlib
import os
import sys
from pathlib import Path

import msgspec
import pytest

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared import variables
from shared.broker import BrokerSettings
from shared.bus.access import access_of
from shared.config import load
from thermocline.supervisor.__main__ import SET_BY_UP, without_misplaced
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import NATS_ENVIRONMENT, nats_child, service_children
from thermocline.supervisor.config import SupervisorConfig


def make_cell(config: SupervisorConfig, **changes: object) -> Cell:
    """A cell with fixed choices."""
    choices: dict[str, object] = {
        "config": config,
        "model": Path("/models/m"),
        "host": "127.0.0.1",
        "port": 8000,
        "nats_port": 4333,
        "nats_urls": ("nats://127.0.0.1:4333",),
        "data_dir": Path("/data"),
        "data_dir_is_temporary": False,
        "shm_prefix": "tc-1-abc",
        "cpu_kv_bytes": 1024,
        "host_kv_bytes": 2048,
        "threads": 3,
    }
    return Cell(**(choices | changes))  # type: ignore[arg-type]


def flags_of(child: ChildSpec) -> dict[str, str]:
    """The flags of a service's command line."""
    flags = child.argv[4:]
    return {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}


def test_children_in_starting_order() -> None:
    """Scheduler and storage first, the gateway last, every worker with a name of its own."""
    children = service_children(make_cell(SupervisorConfig(workers=2)), {})

    assert [child.name for child in children] == ["scheduler", "storage", "worker-0", "worker-1", "gateway"]


def test_each_scheduler_has_a_name_of_its_own() -> None:
    """The first keeps the one that it has alone; all stop at the same stage, behind everybody who needs one."""
    children = service_children(make_cell(SupervisorConfig(schedulers=3)), {})
    schedulers = [child for child in children if child.name.startswith("scheduler")]

    assert [child.name for child in schedulers] == ["scheduler", "scheduler-1", "scheduler-2"]
    assert [flags_of(child)["id"] for child in schedulers] == ["scheduler", "scheduler-1", "scheduler-2"]
    assert len({child.log for child in schedulers}) == 3
    assert len({child.stage for child in schedulers}) == 1


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        ("[worker]\nmetrics_port = 9300\n[scheduler]\nmetrics_port = 9100\n", [None, "9101", None, None, "9301", None]),
        ("[worker]\nmetrics_port = 0\n", [None] * 6),
        ("worker = 3\n", [None] * 6),
        ("[worker\n", [None] * 6),
    ],
)
def test_processes_of_one_service_serve_metrics_at_ports_behind_one_another(
    tmp_path: Path, settings: str, ports: list[str | None]
) -> None:
    """The first has the settings file's own, which a flag would only say again."""
    file = tmp_path / "cell.toml"
    file.write_text(settings, encoding="utf-8")
    children = service_children(make_cell(SupervisorConfig(workers=2, schedulers=2), config_file=file), {})

    assert [flags_of(child).get("metrics-port") for child in children] == ports


def test_children_in_stopping_order() -> None:
    """New work is cut off first; the broker outlives everybody."""
    cell = make_cell(SupervisorConfig())
    children = [nats_child(cell, Path("/bin/nats-server"), Path("/data/nats.conf")), *service_children(cell, {})]

    stopping = [child.name for child in sorted(children, key=lambda child: child.stage)]
    assert stopping == ["gateway", "worker-0", "storage", "scheduler", "nats"]


def test_the_broker_collects_garbage_early_unless_the_operator_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of stream blocks would otherwise double what it holds."""
    cell = make_cell(SupervisorConfig())
    monkeypatch.delenv("GOGC", raising=False)

    ours = nats_child(cell, Path("/bin/nats-server"), Path("/data/nats.conf"))
    monkeypatch.setenv("GOGC", "200")
    theirs = nats_child(cell, Path("/bin/nats-server"), Path("/data/nats.conf"))

    assert NATS_ENVIRONMENT == {"GOGC": "50"}
    assert ours.env == {variables.SUPERVISED: str(os.getpid()), "GOGC": "50"}
    assert theirs.env == {variables.SUPERVISED: str(os.getpid())}


OF_THE_CELL = {
    "THERMOCLINE_ADMIN_KEY": ("gateway",),
    "THERMOCLINE_API_KEYS": ("gateway",),
    "THERMOCLINE_TENANTS": ("gateway",),
    "THERMOCLINE_KEYS": ("storage",),
    "THERMOCLINE_KEY_DEFAULT": ("storage",),
    "AWS_SECRET_ACCESS_KEY": ("storage",),
    "AZURE_STORAGE_KEY": ("storage",),
    "GOOGLE_SERVICE_ACCOUNT_KEY": ("storage",),
    "THERMOCLINE_NATS_PASSWORD": ("scheduler", "storage", "worker-0", "gateway"),
    "THERMOCLINE_NATS_TOKEN": ("scheduler", "storage", "worker-0", "gateway"),
    "THERMOCLINE_NATS_CA": ("scheduler", "storage", "worker-0", "gateway"),
    "THERMOCLINE_PREFETCH_WAIT": ("scheduler",),
    "THERMOCLINE_STATE_BYTES": ("storage",),  # An old name of hidden_bytes.
    "THERMOCLINE_API_KEY": (),
    "THERMOCLINE_MY_SECRET": (),
    "thermocline_admin_key": (),
    "PATH": ("nats", "scheduler", "storage", "worker-0", "gateway"),
    "LD_LIBRARY_PATH": ("nats", "scheduler", "storage", "worker-0", "gateway"),
    "CUDA_VISIBLE_DEVICES": ("nats", "scheduler", "storage", "worker-0", "gateway"),
}


@pytest.mark.parametrize(("variable", "readers"), OF_THE_CELL.items())
def test_a_child_gets_the_variables_that_it_reads(variable: str, readers: tuple[str, ...]) -> None:
    """A worker that was taken over has none of the cell's keys, nor has the broker; what is not ours stays."""
    cell = make_cell(SupervisorConfig())
    children = [nats_child(cell, Path("/bin/nats-server"), Path("/data/nats.conf")), *service_children(cell, {})]

    assert tuple(child.name for child in children if child.inherits(variable)) == readers


def test_a_password_in_the_broker_s_url_is_in_no_command_line() -> None:
    """Every user of the machine reads those; the children get it in their environment."""
    urls = ("nats://me:s%3Acret@one:4222", "tls://me:s%3Acret@two")
    of_another = {"THERMOCLINE_NATS_PASSWORD_FILE": "/p", "THERMOCLINE_NATS_TOKEN_FILE": "/t"}
    children = service_children(make_cell(SupervisorConfig(nats=urls), nats_port=0, nats_urls=urls), of_another)

    for child in children:
        assert "cret" not in " ".join(child.argv)
        flags = {name.replace("-", "_"): value for name, value in flags_of(child).items() if name.startswith("nats")}
        settings = load(BrokerSettings, "nats", environ={**of_another, **child.env}, flags=flags)
        access = access_of(settings, {**of_another, **child.env})
        assert access.urls == ("nats://one:4222", "tls://two")
        assert (access.user, access.password) == ("me", "s:cret")
    assert len(children) == 4


def test_a_token_in_the_broker_s_url_is_in_no_command_line() -> None:
    """As a password, and a user of another broker in the environment does not take its place."""
    urls = ("nats://secret@one:4222",)
    of_another = {"THERMOCLINE_NATS_USER": "me", "THERMOCLINE_NATS_PASSWORD": "mine"}
    children = service_children(make_cell(SupervisorConfig(nats=urls), nats_port=0, nats_urls=urls), of_another)

    for child in children:
        assert "secret" not in " ".join(child.argv)
        settings = load(BrokerSettings, "nats", environ={**of_another, **child.env}, flags={"nats": "nats://one:4222"})
        access = access_of(settings, {**of_another, **child.env})
        assert (access.urls, access.token, access.user) == (("nats://one:4222",), "secret", "")


def test_every_child_is_told_the_broker_and_its_name() -> None:
    """All meet at the same broker."""
    for child in service_children(make_cell(SupervisorConfig(nats=("a", "b")), nats_urls=("a", "b")), {}):
        assert flags_of(child)["nats"] == "a,b"
        assert flags_of(child)["id"] == child.name


def test_workers_get_their_share_of_the_machine() -> None:
    """Threads, pools and the cell's own shared memory prefix reach the worker."""
    worker = service_children(make_cell(SupervisorConfig(), cpu_dtype="float32"), {})[2]

    flags = flags_of(worker)
    assert worker.argv[:4] == (sys.executable, "-P", "-m", "services.worker")
    assert (flags["threads"], flags["cpu-kv-bytes"], flags["shm-prefix"]) == ("3", "1024", "tc-1-abc")
    assert flags["cpu-dtype"] == "float32"
    assert worker.env["OMP_NUM_THREADS"] == "3"


def test_what_is_unset_is_left_to_the_services() -> None:
    """No default is repeated here."""
    scheduler = service_children(make_cell(SupervisorConfig()), {})[0]

    assert {"policy", "max-batch-tokens", "max-running", "config"}.isdisjoint(flags_of(scheduler))


def test_restoration_is_told_to_whoever_it_concerns(tmp_path: Path) -> None:
    """The form to the scheduler, the pool and the limit of the disk to the storage, the profile to workers."""
    config = SupervisorConfig(
        disk_dir=("/d",), disk_read_bytes_per_s=10**8, hidden_form="0/4/0", restoring="hidden", profile=str(tmp_path)
    )

    scheduler, storage, worker, _ = map(flags_of, service_children(make_cell(config, hidden_bytes=4096), {}))
    unset = service_children(make_cell(SupervisorConfig()), {})

    assert (scheduler["hidden-form"], scheduler["restoring"]) == ("0/4/0", "hidden")
    assert (storage["hidden-bytes"], storage["disk-read-bytes-per-s"]) == ("4096", "100000000")
    assert worker["profile"] == str(tmp_path)
    names = {name for child in unset for name in flags_of(child)}
    assert names.isdisjoint({"hidden-form", "restoring", "hidden-bytes", "disk-read-bytes-per-s", "profile"})


def test_importance_is_told_to_whoever_it_concerns(tmp_path: Path) -> None:
    """The gateway decides who may have it, the storage keeps what it reads; a gate is found from anywhere."""
    config = SupervisorConfig(
        importance="gated", importance_gate=f"{tmp_path}/here/../gate.json", importance_ratio=0.0, sparse=True
    )

    _, storage, _, gateway = map(flags_of, service_children(make_cell(config), {}))
    unset = service_children(make_cell(SupervisorConfig()), {})

    assert storage["sparse"] == "true"
    assert (gateway["importance"], gateway["importance-ratio"]) == ("gated", "0.0")
    assert gateway["importance-gate"] == str(tmp_path / "gate.json")
    names = {name for child in unset for name in flags_of(child)}
    assert names.isdisjoint({"importance", "importance-gate", "importance-ratio", "sparse"})


def test_a_settings_file_reaches_every_service() -> None:
    """Each service reads its own section."""
    cell = make_cell(SupervisorConfig(), config_file=Path("/etc/cell.toml"))

    assert {flags_of(child)["config"] for child in service_children(cell, {})} == {"/etc/cell.toml"}


def test_a_checkout_comes_first_and_keeps_the_users_path() -> None:
    """Packages are found without an installation; what the user added stays."""
    child = service_children(make_cell(SupervisorConfig()), {"PYTHONPATH": "/mine"})[0]

    first, second = child.env["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "thermocline").is_dir()
    assert second == "/mine"


@pytest.mark.parametrize("service", ["gateway", "scheduler", "storage", "worker"])
def test_every_flag_is_a_setting_of_its_service(service: str) -> None:
    """The supervisor says nothing that a service would not understand."""
    config = SupervisorConfig(
        page_size=16,
        policy="lru",
        device="cpu",
        max_batch_tokens=8,
        max_running=2,
        max_queued=9,
        stream_replicas=3,
        disk_dir=("/d",),
        disk_read_bytes_per_s=10**8,
        hidden_form="auto",
        hidden_bytes=2**20,
        restoring="kv",
        profile="/p.json",
        importance="gated",
        importance_gate="/g.json",
        importance_ratio=0.5,
        sparse=True,
    )
    child = next(
        child
        for child in service_children(make_cell(config, cpu_dtype="float32"), {})
        if child.name.startswith(service)
    )
    module = importlib.import_module(f"services.{service}.config")

    structs = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    known = [{field.name.replace("_", "-") for field in msgspec.structs.fields(kind)} for kind in structs]
    assert any(set(flags_of(child)) <= names for names in known), (flags_of(child), known)


@pytest.mark.parametrize("grace_s", [0.0, 2.5, 10.0, 60.0])
def test_a_worker_drains_and_stops_within_the_time_that_its_supervisor_waits(grace_s: float) -> None:
    """Else it would be killed in the middle of what it was given time for."""
    children = service_children(make_cell(SupervisorConfig(grace_s=grace_s)), {})
    flags = flags_of(next(child for child in children if child.name == "worker-0"))

    assert int(flags["stop-timeout-ms"]) >= 1
    assert int(flags["drain-timeout-ms"]) + int(flags["stop-timeout-ms"]) <= max(1, grace_s * 1_000)


def test_each_process_has_its_own_user_and_no_password_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers share one; and what the environment says of another broker's credentials is not mixed with it."""
    config = SupervisorConfig(workers=2, schedulers=2)
    passwords = {name: f"password-of-{name}" for name in ("gateway", "scheduler", "storage", "worker-0", "worker-1")}
    monkeypatch.setenv("THERMOCLINE_NATS_CREDENTIALS", "/elsewhere.creds")

    children = service_children(make_cell(config, broker_passwords=passwords))

    users = {child.name: flags_of(child)["nats-user"] for child in children}
    own = {name: name for name in passwords}
    assert users == own | {"scheduler-1": "scheduler"}
    for child in children:
        access = access_of(
            load(BrokerSettings, "nats", environ=os.environ | child.env, flags={"nats_user": users[child.name]}),
            os.environ | child.env,
        )
        assert access.current_password() == passwords[users[child.name]]
        assert not any("password-of" in part for part in child.argv)


def test_with_somebody_elses_broker_its_settings_are_left_alone() -> None:
    """User and password come from the environment or the settings file then."""
    cell = make_cell(SupervisorConfig(nats=("nats://broker:4222",)))

    for child in service_children(cell, {}):
        assert "nats-user" not in flags_of(child)
        assert not any(name.startswith("THERMOCLINE_NATS") for name in child.env)


def test_each_worker_is_told_its_gpus_and_what_it_takes_on_a_cpu() -> None:
    """Where the model runs is the worker's finding, so it gets the choices for both."""
    config = SupervisorConfig(workers=2, tensor_parallel=2, device_memory_fraction=0.8, max_batch_tokens=512)
    children = service_children(make_cell(config, cpu_dtype="float32"), {})
    workers = [flags_of(child) for child in children if child.name.startswith("worker")]

    assert [flags["gpu"] for flags in workers] == ["0", "2"]
    for flags in workers:
        assert flags["node-workers"] == "2"
        assert (flags["cpu-kv-bytes"], flags["cpu-dtype"]) == ("1024", "float32")
        assert (flags["device-memory-fraction"], flags["max-batch-tokens"]) == ("0.8", "512")
        assert not {"device", "dtype", "device-kv-bytes"} & set(flags)


def test_exact_mode_reaches_workers_and_the_gateway() -> None:
    """Which names KV as they do."""
    children = service_children(make_cell(SupervisorConfig(exact=True, workers=2)), {})

    told = [child.name for child in children if "exact" in flags_of(child)]
    assert told == ["worker-0", "worker-1", "gateway"]


def test_sizes_and_devices_that_were_chosen_reach_every_worker() -> None:
    """They win over what a worker would find out."""
    config = SupervisorConfig(device="cuda", dtype="float16", device_kv_bytes=7)
    flags = flags_of(next(child for child in service_children(make_cell(config), {}) if child.name == "worker-0"))

    assert (flags["device"], flags["dtype"], flags["device-kv-bytes"]) == ("cuda", "float16", "7")


def test_folders_of_adapters_mean_the_same_to_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are relative to where the cell was started; what is no NAME=DIR is left for the gateway to refuse."""
    monkeypatch.chdir(tmp_path)
    config = load(SupervisorConfig, "up", flags={"adapter": "a=x,b=/y/z,c"})

    (gateway,) = (child for child in service_children(make_cell(config), {}) if child.name == "gateway")

    assert flags_of(gateway)["adapter"] == f"a={tmp_path}/x,b=/y/z,c"


def test_a_flag_of_a_process_is_refused_with_the_place_where_it_is_set() -> None:
    """`up` has a part of all settings as flags; other strays are told as before, a value of such a flag is none."""
    kinds: dict[str, type[msgspec.Struct]] = {
        "gateway": GatewayConfig,
        "scheduler": SchedulerConfig,
        "worker": WorkerConfig,
    }
    strays = ["--api-keys", "a,b", "--tenants=f", "stray", "--jsom", "4", "--nats-ca", "--id", "worker-7"]

    faults, others = without_misplaced(strays, kinds)

    assert others == ["stray", "--jsom", "4", "--id", "worker-7"]
    assert faults == [
        "--api-keys is a setting of gateway, not of `up`: "
        "set THERMOCLINE_API_KEYS, or api_keys in section [gateway] of --config FILE",
        "--tenants is a setting of gateway, not of `up`: "
        "set THERMOCLINE_TENANTS, or tenants in section [gateway] of --config FILE",
        "--nats-ca is a setting of gateway, scheduler, worker, not of `up`: "
        "set THERMOCLINE_NATS_CA, or nats_ca in section [gateway] or [scheduler] or [worker] of --config FILE",
    ]


def test_what_up_gives_its_processes_cannot_be_set_elsewhere() -> None:
    """So the refusal above names no file or variable for it."""
    passwords = dict.fromkeys(("scheduler", "storage", "worker-0", "worker-1", "gateway"), "x")
    cell = make_cell(SupervisorConfig(workers=2), cpu_dtype="float32", broker_passwords=passwords)
    given = {name.replace("-", "_") for child in service_children(cell, {}) for name in flags_of(child)}

    assert given - set(SupervisorConfig.__struct_fields__) - SET_BY_UP == set()
    assert given >= SET_BY_UP
