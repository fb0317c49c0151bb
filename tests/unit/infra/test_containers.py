"""The images start processes that exist, under a user that is not root, from bases that stay the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared import metrics
from shared.library_versions import RANGES
from tests.unit.infra.deployed_code import SETTINGS, settings_from
from thermocline.commands import commands
from thermocline.supervisor.ports import free_port
from tools.resolution import supported_pythons

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra" / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()

# Continued lines are one instruction.
INSTRUCTIONS = [
    line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")
]


def stage(name: str) -> list[str]:
    """The instructions of ``FROM … AS name``."""
    starts = [number for number, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")]
    for start, end in zip(starts, [*starts[1:], len(INSTRUCTIONS)], strict=True):
        if INSTRUCTIONS[start].endswith(f" AS {name}"):
            return INSTRUCTIONS[start:end]
    raise KeyError(name)


def words(instructions: list[str], keyword: str) -> str:
    """What the only such instruction says."""
    (found,) = [line for line in instructions if line.startswith(keyword + " ")]
    return found.removeprefix(keyword).strip()


def runs(instructions: list[str]) -> list[list[str]]:
    """The commands of ``RUN`` that are lists."""
    return [json.loads(line.removeprefix("RUN ")) for line in instructions if line.startswith("RUN [")]


def installed_by(argument: str, value: str, folder: Path) -> tuple[int, list[list[str]]]:
    """Exit status and commands of the ``RUN`` that a build argument decides, with pip and uv that only note them."""
    (script,) = [line.removeprefix("RUN ") for line in stage("build") if line.startswith(f'RUN case "${argument}"')]
    told = folder / "told"
    for name in ("pip", "uv"):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nfor word in {name} "$@"; do echo "$word"; done >>{told}\necho >>{told}\n')
        tool.chmod(0o755)
    script = script.replace("/usr/local/bin/pip", str(folder / "pip"))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", argument: value}
    status = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, timeout=120).returncode
    return status, [each.split("\n") for each in told.read_text().strip().split("\n\n")] if told.exists() else []


def variables(instructions: list[str]) -> dict[str, str]:
    """Variables that ``ENV`` sets."""
    pairs = [pair for line in instructions if line.startswith("ENV ") for pair in line.split()[1:]]
    return dict(pair.split("=", 1) for pair in pairs)


def health_check(process: str) -> list[str]:
    """The command of ``HEALTHCHECK``."""
    command: list[str] = json.loads(words(stage(process), "HEALTHCHECK").partition("CMD ")[2])
    return command


@pytest.mark.parametrize("process", SETTINGS)
def test_each_target_runs_its_process(process: str) -> None:
    """Entry point and command are lists, so no shell stands between Docker and the process."""
    assert json.loads(words(stage("runtime"), "ENTRYPOINT")) == ["thermocline"]
    assert json.loads(words(stage(process), "CMD")) == [process]
    assert process in commands()


@pytest.mark.parametrize("process", SETTINGS)
def test_variables_of_an_image_are_settings(process: str) -> None:
    """The process of that target takes each."""
    required = [] if process in ("scheduler", "storage") else ["--model=/models/any"]

    settings_from(process, required, variables(stage(process)))


@pytest.mark.parametrize("process", SETTINGS)
def test_the_health_check_asks_where_the_process_listens(process: str) -> None:
    """Its port is the one that the image sets."""
    set_by_image = variables(stage(process))
    port = set_by_image.get("THERMOCLINE_PORT") or set_by_image["THERMOCLINE_METRICS_PORT"]

    assert f"'127.0.0.1', {port}," in health_check(process)[2]


def test_a_health_check_tells_a_process_that_answers_from_one_that_does_not() -> None:
    """The very command, pointed at a port of ours, before and after somebody serves metrics there."""
    port = free_port("127.0.0.1")
    _, flag, program = health_check("scheduler")
    command = [sys.executable, flag, program.replace("9100", str(port))]

    before = subprocess.run(command, capture_output=True, timeout=120).returncode
    metrics.serve(port)
    after = subprocess.run(command, capture_output=True, timeout=120).returncode

    assert (before, after) == (1, 0)


def test_the_process_is_nobody_in_particular() -> None:
    """A fixed number, which the last stage does not take back."""
    assert words(stage("runtime"), "USER") == "10001:10001"
    assert not any(line.startswith("USER") for process in SETTINGS for line in stage(process))


def test_bases_have_fixed_versions(tmp_path: Path) -> None:
    """Of Python one patch release, of PyTorch the newest minor version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    beyond = RANGES["torch"].beyond
    pin = f"torch=={beyond[0]}.{beyond[1] - 1}.*"

    python = re.search(r"^ARG PYTHON=(3\.\d+)\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert python is not None
    assert python[1] in supported_pythons(project["requires-python"])
    (_, (tool, on_cpu)), (_, (with_cuda,)) = (
        installed_by("VARIANT", each, _new_folder(tmp_path / each)) for each in ("cpu", "cuda")
    )
    assert [on_cpu[-1], with_cuda[-1]] == [pin, pin]
    assert on_cpu[-3:-1] == ["--torch-backend", "cpu"]
    assert tool[-1] in project["optional-dependencies"]["dev"]


def test_bytecode_of_pytorch_is_in_the_image(tmp_path: Path) -> None:
    """Processes write none, so each start would compile what uv, unlike pip, leaves uncompiled."""
    _, ((first, *_), (second, *command)) = installed_by("VARIANT", "cpu", tmp_path)

    assert variables(stage("runtime"))["PYTHONDONTWRITEBYTECODE"] == "1"
    assert (first, second) == ("pip", "uv")
    assert "--compile-bytecode" in command


def test_a_build_needs_no_image_but_that_of_python() -> None:
    """A syntax line would have BuildKit fetch its own front end from a registry, which a mirror of bases may lack."""
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.MULTILINE | re.IGNORECASE)


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("argument", ["VARIANT", "SHARE"])
def test_an_argument_with_a_value_that_is_not_known_ends_the_build(argument: str, tmp_path: Path) -> None:
    """Nothing is installed."""
    status, commands_run = installed_by(argument, "cude", tmp_path)

    assert status != 0
    assert commands_run == []


def test_locked_versions_are_installed_with_their_hashes() -> None:
    """Before the project itself, which brings only what the lock leaves out."""
    _, locked, project = runs(stage("build"))

    assert locked == ["pip", "install", "--require-hashes", "--no-deps", "-r", "requirements.lock"]
    assert project == ["pip", "install", "."]


def test_sharing_installs_what_the_extra_says(tmp_path: Path) -> None:
    """Only where the image is built for it; the version is that of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["nixl"]

    expected = [["pip", "install", extra.partition(";")[0].strip()]]
    assert installed_by("SHARE", "off", _new_folder(tmp_path / "off")) == (0, [])
    assert installed_by("SHARE", "nixl", _new_folder(tmp_path / "nixl")) == (0, expected)
    assert "ARG SHARE=off" in DOCKERFILE


def test_every_stage_builds_on_one_that_is_known() -> None:
    """Each ``FROM`` names a stage above, or the official image of Python.

    None is named by an argument: podman 4 skips a stage that only a variable names, and then does not find it.
    """
    known = {"python:${PYTHON}"}
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            base, _, name = line.removeprefix("FROM ").partition(" AS ")
            assert base in known
            known.add(name)


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    """Every source of ``COPY`` is in the repository and let through by the ignore file, which lets through no more."""
    copied = {
        source
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()

    assert all((ROOT / source).exists() for source in copied)
    assert copied == {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore


def test_packages_of_the_project_are_all_copied() -> None:
    """What pip shall install is there when it does."""
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]

    copied = " ".join(line for line in stage("build") if line.startswith("COPY "))
    assert all(f"COPY {name.rstrip('*')} " in copied for name in included)


def test_labels_follow_the_open_container_initiative() -> None:
    """Title, licence, version, revision and time of making are there."""
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", words(stage("runtime"), "LABEL")))

    assert {"title", "description", "licenses", "version", "revision", "created"} <= labels


def test_layers_leave_no_package_lists_behind() -> None:
    """Package lists are removed in the layer that fetched them, and nothing recommended comes along."""
    (installing,) = [line for line in INSTRUCTIONS if "apt-get install" in line]

    assert "--no-install-recommends" in installing
    assert "rm -rf /var/lib/apt/lists/*" in installing
