"""The example configurations of the broker are valid and agree with what the embedded one does."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from thermocline.broker.__main__ import main
from thermocline.supervisor.nats_config import MAX_PAYLOAD_BYTES
from thermocline.supervisor.nats_program import find_nats_program

FOLDER = Path(__file__).parents[3] / "infra" / "nats"
CONFIGS = sorted(FOLDER.glob("*.conf"))
SERVERS = [config for config in CONFIGS if config.stem != "users"]  # That one is included by others.

ENVIRONMENT = {
    "TC_NATS_NAME": "nats-1",
    "TC_NATS_PASSWORD": "secret",
    "TC_NATS_ROUTE_PASSWORD": "other-secret",
    **{
        f"TC_NATS_{kind}_PASSWORD": "its-secret"
        for kind in ("GATEWAY", "SCHEDULER", "STORAGE", "WORKER", "LISBON", "PORTO", "ROUTER")
    },
    **{f"TC_NATS_{number}": f"nats://routes:other-secret@nats-{number}:6222" for number in (1, 2, 3)},
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_server_accepts_it(config: Path, tmp_path: Path) -> None:
    """``nats-server -t`` finds no fault."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("nats")
    files = {"TC_NATS_CERT": str(certificate), "TC_NATS_KEY": str(key), "TC_NATS_CA": str(authority.ca)}
    command: list[Any] = [find_nats_program().path, "-t", "-c", config]

    done = subprocess.run(command, env=os.environ | ENVIRONMENT | files, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_variable_is_explained(config: Path) -> None:
    """A server that lacks a variable does not start, so the README names each."""
    variables = {word.strip("[],") for word in _with_included(config).split() if word.startswith("$TC_")}

    readme = (FOLDER / "README.md").read_text()
    assert variables
    assert all(variable.removeprefix("$") in readme for variable in variables)


@pytest.mark.parametrize("config", SERVERS, ids=lambda path: path.stem)
def test_prompts_have_one_bound_everywhere(config: Path) -> None:
    """The same prompt is accepted with the embedded broker and with these."""
    text = _with_included(config)

    assert text.count("max_payload:") == 1
    assert f"max_payload: {MAX_PAYLOAD_BYTES // 1024**2}MB" in text


def test_the_examples_are_there() -> None:
    """The README's files exist."""
    servers = ["cluster-tls", "cluster", "hub", "single-tls-users", "single-tls", "single-users", "single"]
    assert {config.stem for config in CONFIGS} == {*servers, "users"}


def test_the_users_are_those_that_the_command_makes(tmp_path: Path) -> None:
    """The file is made, not written: what the command says now is what is there."""
    assert main(["--variables", "--out", str(tmp_path)]) == 0

    assert (FOLDER / "users.conf").read_text() == (tmp_path / "users.conf").read_text()


def _with_included(config: Path) -> str:
    text = config.read_text()
    included = [line.split('"')[1] for line in text.splitlines() if line.startswith("include ")]
    return text + "".join(_with_included(FOLDER / name) for name in included)
