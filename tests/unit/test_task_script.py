"""``./task`` in a checkout of its own, with an interpreter that only notes what it is asked to install."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.resolution import supported_pythons

ROOT = Path(__file__).parents[2]

# Stands for Python: makes the files that venv and pip would make, and writes down each installation.
# While the file "slow" exists an installation takes a while; with "broken" it fails; with "cut" it is killed. With
# "miscompiled" it succeeds, but the worker's kernels cannot be compiled.
_PYTHON = r"""#!/bin/sh
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version") exit 0 ;;
    "-m pip install "*--require-hashes*)
        # The lock brings the tools that come after it.
        bin=$(dirname "$0")
        printf '#!/bin/sh\necho "uv $*" >>"$CHECKOUT/asked"\n' >"$bin/uv" && chmod +x "$bin/uv"
        echo "pip $*" >>"$CHECKOUT/asked" ;;
    "-m pip install "*.whl) echo "pip $*" >>"$CHECKOUT/asked" ;;
    "-m pip install "*)
        echo "pip $*" >>"$CHECKOUT/asked"
        echo installed >>"$CHECKOUT/installations"
        [ -e "$CHECKOUT/slow" ] && sleep 0.5
        [ -e "$CHECKOUT/broken" ] && exit 1
        [ -e "$CHECKOUT/cut" ] && kill -9 "$PPID"
        bin=$(dirname "$0")
        printf '#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done\n' >"$bin/task" && chmod +x "$bin/task" ;;
    "-m services.worker.native")
        echo compiled >>"$CHECKOUT/compilations"
        [ ! -e "$CHECKOUT/miscompiled" ] ;;
    -c*) exit 0 ;;
esac
"""

PROJECT = '[project]\ndependencies = [\n    "torch==2.13.*",\n    "triton>=3",\n]\n'


class Checkout:
    """A folder with ``./task`` and what it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copy(ROOT / "task", folder / "task")
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "requirements-dev.lock").write_text("")
        (folder / "Taskfile.yml").write_text("")
        self.python = folder / "python-for-tests"
        self.python.write_text(_PYTHON)
        self.python.chmod(0o755)

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "THERMOCLINE_TORCH"}
        return {**inherited, "CHECKOUT": str(self.folder), "THERMOCLINE_PYTHON": str(self.python)}

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """Start ``./task`` from another folder, as scripts do."""
        return subprocess.Popen(
            [self.folder / "task", *words],
            env={**self.environment(), **environ},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **environ: str) -> tuple[int, str, str]:
        """Exit code, output and errors of one run."""
        process = self.start(*words, **environ)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def installations(self) -> int:
        notes = self.folder / "installations"
        return len(notes.read_text().splitlines()) if notes.exists() else 0

    @property
    def asked(self) -> list[str]:
        """What pip and uv were asked for, in order."""
        notes = self.folder / "asked"
        return notes.read_text().splitlines() if notes.exists() else []

    def stand_in(self, folder: Path, name: str, body: str) -> None:
        """Put a program of that name into ``folder``."""
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh checkout in a folder whose name has a space."""
    return Checkout(tmp_path / "a checkout")


def test_only_the_first_run_installs(checkout: Checkout) -> None:
    """Later runs compare a stamp and go on at once."""
    codes = [checkout.run("test")[0] for _ in range(3)]

    assert codes == [0, 0, 0]
    assert checkout.installations == 1


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_installation_compiles_the_kernels(checkout: Checkout, is_faulty: bool) -> None:
    """Once; where that fails, it is said and the installation stands."""
    if is_faulty:
        (checkout.folder / "miscompiled").touch()

    runs = [checkout.run("test") for _ in range(2)]

    assert [code for code, _, _ in runs] == [0, 0]
    assert (checkout.folder / "compilations").read_text() == "compiled\n"
    assert ("kernels were not compiled" in runs[0][2]) == is_faulty


def test_arguments_arrive_as_they_were_given(checkout: Checkout) -> None:
    """Spaces and quotes survive the way to the task runner."""
    _, out, _ = checkout.run("trace", "--", "a file.jsonl", 'quo"te')

    words = out.splitlines()
    assert words[-4:] == ["[trace]", "[--]", "[a file.jsonl]", '[quo"te]']
    assert f"[{checkout.folder}/Taskfile.yml]" in words


def test_no_arguments_list_the_tasks(checkout: Checkout) -> None:
    """``./task`` alone shows what there is."""
    assert checkout.run()[1].splitlines()[-1] == "[--list]"


def test_a_changed_pyproject_installs_again(checkout: Checkout) -> None:
    """New dependencies reach an existing environment."""
    checkout.run()
    (checkout.folder / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    checkout.run()

    assert checkout.installations == 2


def test_a_changed_lock_installs_again(checkout: Checkout) -> None:
    """New versions of what a dependency needs reach an existing environment, too."""
    checkout.run()
    (checkout.folder / "requirements-dev.lock").write_text("one==2\n")
    checkout.run()

    assert checkout.installations == 2


def test_locked_versions_come_first_and_with_hashes(checkout: Checkout) -> None:
    """What is left to the resolver, PyTorch above all, comes with the project itself."""
    checkout.run()

    lock, project = checkout.asked
    assert lock.endswith("--require-hashes --no-deps -r requirements-dev.lock")
    assert project.endswith("--no-build-isolation -e .[dev]")


def test_the_cpu_build_of_torch_is_asked_for_and_remembered(checkout: Checkout) -> None:
    """uv installs it before pip would choose; later runs need not say it again, and another build starts afresh."""
    checkout.run(THERMOCLINE_TORCH="cpu")
    (checkout.folder / "requirements-dev.lock").write_text("one==2\n")
    checkout.run()
    (checkout.folder / ".venv" / "of-the-cpu-build").touch()

    kinds = [line.split()[0] for line in checkout.asked]
    assert kinds == ["pip", "uv", "pip"] * 2
    assert checkout.asked[1].endswith("--torch-backend cpu torch==2.13.*")
    assert checkout.run(THERMOCLINE_TORCH="default")[0] == 0
    assert not (checkout.folder / ".venv" / "of-the-cpu-build").exists()
    assert [line.split()[0] for line in checkout.asked[6:]] == ["pip", "pip"]


def test_a_wheel_of_torch_is_installed(checkout: Checkout, tmp_path: Path) -> None:
    """By its absolute path, because the script runs from the checkout."""
    (tmp_path / "torch-2.whl").touch()

    checkout.run(THERMOCLINE_TORCH=os.path.relpath(tmp_path / "torch-2.whl", "/"))

    assert checkout.asked[1].endswith(f"install --disable-pip-version-check -qq {tmp_path}/torch-2.whl")


def test_another_build_of_torch_is_refused(checkout: Checkout) -> None:
    """Before anything is made, naming the choices."""
    code, _, err = checkout.run(THERMOCLINE_TORCH="cuda9")

    assert code == 1
    assert "THERMOCLINE_TORCH is 'cuda9'; it must be cpu, default, or the path of a wheel" in err
    assert not (checkout.folder / ".venv").exists()


def test_another_system_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    """One sentence says what it runs on, before anything is downloaded."""
    checkout.stand_in(tmp_path / "programs", "uname", "echo Darwin")

    code, _, err = checkout.run(PATH=f"{tmp_path / 'programs'}:{os.environ['PATH']}")

    assert code == 1
    assert "Thermocline runs on Linux only (x86-64 and arm64)" in err
    assert not (checkout.folder / ".venv").exists()


def test_pythons_that_do_not_fit_are_named(checkout: Checkout, tmp_path: Path) -> None:
    """One is too new, one lacks the module ensurepip, and one is a stand-in of a version manager."""
    programs = tmp_path / "programs"
    checkout.stand_in(programs, "python3.13", "echo 'has no module ensurepip' >&2; exit 1")
    checkout.stand_in(programs, "python3.12", "exit 127")
    checkout.stand_in(programs, "python3.11", "exit 127")
    checkout.stand_in(programs, "python3.14", "exit 127")
    code = "import runpy, sys; sys.version_info = (3, 15, 0); exec(sys.argv.pop(2))"
    checkout.stand_in(programs, "python3", f"exec {sys.executable} -c '{code}' \"$@\"")

    exit_code, _, err = checkout.run(THERMOCLINE_PYTHON="", PATH=f"{programs}:/usr/bin:/bin")

    assert exit_code == 1
    assert "task: python3.13 has no module ensurepip" in err
    assert "task: python3.12 does not run" in err
    assert "task: python3 is Python 3.15, which is not supported" in err
    assert "needs Python 3.11 to 3.14" in err


def test_a_free_threaded_python_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    """Before anything is downloaded: several dependencies have no wheels for such a build."""
    programs = tmp_path / "programs"
    code = 'import sys, sysconfig; sysconfig.get_config_var = {"Py_GIL_DISABLED": 1}.get; exec(sys.argv.pop(2))'
    checkout.stand_in(programs, "python3.13t", f"exec {sys.executable} -c '{code}' \"$@\"")

    exit_code, _, err = checkout.run(THERMOCLINE_PYTHON=str(programs / "python3.13t"))

    assert exit_code == 1
    assert "python3.13t is a free-threaded build, which is not supported" in err
    assert not (checkout.folder / ".venv").exists()


def test_the_pythons_are_those_of_the_project(checkout: Checkout) -> None:
    """The script and ``requires-python`` allow the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first, *_, last = supported_pythons(project["requires-python"])
    bounds = f"({first.replace('.', ', ')}) <= sys.version_info[:2] <= ({last.replace('.', ', ')})"

    assert bounds in (ROOT / "task").read_text(encoding="utf-8")


def test_an_interrupted_installation_starts_afresh(checkout: Checkout) -> None:
    """What a killed run left half written is thrown away."""
    cut = checkout.folder / "cut"
    cut.touch()
    code, _, _ = checkout.run()
    assert code != 0
    (checkout.folder / ".venv" / "half-written").touch()
    cut.unlink()

    code, _, _ = checkout.run()

    assert code == 0
    assert checkout.installations == 2
    assert not (checkout.folder / ".venv" / "half-written").exists()


def test_a_failed_installation_is_told_and_tried_again(checkout: Checkout) -> None:
    """Exit code 1 and a sentence; the next run retries."""
    broken = checkout.folder / "broken"
    broken.touch()
    code, _, err = checkout.run()
    broken.unlink()

    assert code == 1
    assert "the installation failed" in err
    assert checkout.run()[0] == 0


def test_a_moved_checkout_starts_afresh(checkout: Checkout, tmp_path: Path) -> None:
    """Scripts in an environment name the folder that it was made in."""
    checkout.run()
    (checkout.folder / ".venv" / "names-the-old-place").touch()
    moved = tmp_path / "moved"
    checkout.folder.rename(moved)
    checkout.folder, checkout.python = moved, moved / "python-for-tests"

    code, _, _ = checkout.run()

    assert code == 0
    assert not (moved / ".venv" / "names-the-old-place").exists()


def test_an_environment_that_somebody_made_is_kept(checkout: Checkout) -> None:
    """A working .venv without our stamp is installed into, not replaced."""
    bin_folder = checkout.folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    shutil.copy(checkout.python, bin_folder / "python")
    (bin_folder / "precious").touch()

    code, _, _ = checkout.run()

    assert code == 0
    assert (bin_folder / "precious").exists()


def test_runs_at_once_install_once(checkout: Checkout) -> None:
    """The second of two first runs waits for the first, and neither fails."""
    (checkout.folder / "slow").touch()
    runs = [checkout.start("test") for _ in range(3)]
    for run in runs:
        run.communicate(timeout=60)

    assert [run.returncode for run in runs] == [0, 0, 0]
    assert checkout.installations == 1


def test_no_python_is_said_clearly(checkout: Checkout) -> None:
    """An interpreter that does not run is passed over; with none left the message says what to do."""
    checkout.python.write_text("#!/bin/sh\necho 'not installed' >&2\nexit 127\n")

    code, _, err = checkout.run()

    assert code == 1
    assert "no usable Python" in err
    assert "python-for-tests not installed" in err
    assert "needs Python 3.11 to 3.14" in err
    assert not (checkout.folder / ".venv").exists()
