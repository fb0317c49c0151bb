"""``./task`` in a checkout of its own, with an interpreter that only notes what it is asked to install."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for Python: makes the files that venv and pip would make, and writes down each installation.
# While the file "slow" exists an installation takes a while; with "broken" it fails; with "cut" it is killed.
_PYTHON = r"""#!/bin/sh
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version") exit 0 ;;
    "-m pip install "*)
        echo installed >>"$CHECKOUT/installations"
        [ -e "$CHECKOUT/slow" ] && sleep 0.5
        [ -e "$CHECKOUT/broken" ] && exit 1
        [ -e "$CHECKOUT/cut" ] && kill -9 "$PPID"
        bin=$(dirname "$0")
        printf '#!/bin/sh\nfor word in "$@"; do echo "[$word]"; done\n' >"$bin/task" && chmod +x "$bin/task" ;;
    -c*) exit 0 ;;
esac
"""


class Checkout:
    """A folder with ``./task`` and what it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copy(ROOT / "task", folder / "task")
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "Taskfile.yml").write_text("")
        self.python = folder / "python-for-tests"
        self.python.write_text(_PYTHON)
        self.python.chmod(0o755)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "CHECKOUT": str(self.folder), "THERMOCLINE_PYTHON": str(self.python)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``./task`` from another folder, as scripts do."""
        return subprocess.Popen(
            [self.folder / "task", *words],
            env=self.environment(),
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output and errors of one run."""
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    @property
    def installations(self) -> int:
        notes = self.folder / "installations"
        return len(notes.read_text().splitlines()) if notes.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A fresh checkout in a folder whose name has a space."""
    return Checkout(tmp_path / "a checkout")


def test_only_the_first_run_installs(checkout: Checkout) -> None:
    """Later runs compare a stamp and go on at once."""
    codes = [checkout.run("test")[0] for _ in range(3)]

    assert codes == [0, 0, 0]
    assert checkout.installations == 1


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
    assert "needs Python 3.11 or newer" in err
    assert not (checkout.folder / ".venv").exists()
