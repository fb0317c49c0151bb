"""What a newcomer waits for is measured as on a stranger's machine, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bench import newcomer, results_file

# Installs a Python that says how pip is configured, and notes its environment.
_TASK = """#!/bin/sh
env >"$HOME/environment-$1"
mkdir -p .venv/bin && touch .venv/.thermocline-stamp
head -c 3000000 /dev/zero >.venv/library
cat >.venv/bin/python <<'END'
#!/bin/sh
case "$*" in
    --version) echo "Python 3.12.9" ;;
    "-m pip config list") echo ":env:.config-file='$PIP_CONFIG_FILE'"; cat settings 2>/dev/null || true ;;
esac
END
chmod +x .venv/bin/python
[ "$1" != fail ]
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a stand-in for ``./task``, for a caller whose own environment configures nothing."""
    for name in newcomer.configured(os.environ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(newcomer, "UV_SYSTEM_FILES", ())
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "task").write_text(_TASK)
    (folder / "task").chmod(0o755)
    _git(folder, "init", "--quiet")
    _commit(folder)
    return folder


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, timeout=60)


def _commit(folder: Path) -> None:
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "all")


def test_figures_are_kept(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of each command, time of the installation, sizes, and which certificates were handed on."""
    for name in newcomer.CERTIFICATES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/authorities")
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)

    newcomer.main([f"--repository={repository}", "--command=./task demo", "--command=./task test", "--save"])
    newcomer.main([f"--repository={repository}", "--command=./task test", "--busy-loops=1", "--save=newcomer_busy"])

    found = json.loads((tmp_path / "newcomer.json").read_text())["results"]
    busy = json.loads((tmp_path / "newcomer_busy.json").read_text())["results"]
    assert (found["busy_loops"], busy["busy_loops"]) == (0, 1)
    assert [row["command"] for row in found["commands"]] == ["./task demo", "./task test"]
    assert (found["python"], found["torch"], found["certificates"]) == ("Python 3.12.9", "default", ["SSL_CERT_FILE"])
    assert (found["venv_mb"], found["is_root"]) == (3, os.getuid() == 0)
    assert 0 <= found["install_s"] <= found["commands"][0]["seconds"] + 1


def test_the_environment_is_a_strangers(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME, PATH, LANG, no file of pip's, and what was asked for; nothing of the caller's."""
    for name in newcomer.CERTIFICATES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://caller.example")
    monkeypatch.setenv("THERMOCLINE_PORT", "1")
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", repository, clone], check=True, timeout=60)

    newcomer.measure(newcomer.Newcomer(clone, home, None, "/usr/bin/python3.12", "cpu"), ["./task demo"])

    given = dict(line.split("=", 1) for line in (home / "environment-demo").read_text().splitlines())
    shell_sets = {"PWD", "SHLVL", "_", "OLDPWD"}
    asked = {"THERMOCLINE_PYTHON", "THERMOCLINE_TORCH"}
    assert given.keys() - shell_sets == {"HOME", "PATH", "LANG", "PIP_CONFIG_FILE"} | asked
    assert (given["HOME"], given["PIP_CONFIG_FILE"]) == (str(home), "/dev/null")


@pytest.mark.parametrize("name", ["PIP_FIND_LINKS", "PIP_CONFIG_FILE", "UV_INDEX_URL"])
def test_a_configured_environment_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before anything runs; /dev/null as pip's file configures nothing."""
    monkeypatch.setenv(name, "/somewhere")

    with pytest.raises(SystemExit, match=f"nothing is measured, because pip or uv is configured here: {name}"):
        newcomer.main([f"--repository={repository}"])

    monkeypatch.setenv(name, "/dev/null")
    assert newcomer.configured(os.environ) == []


def test_a_pip_that_is_configured_all_the_same_is_not_reported(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip itself says after the installation."""
    (repository / "settings").write_text("global.find-links='/wheels'\n")
    _commit(repository)
    monkeypatch.setattr(results_file, "RESULTS", tmp_path / "results")

    with pytest.raises(SystemExit, match=r"nothing is reported, because pip is configured: global\.find-links"):
        newcomer.main([f"--repository={repository}", "--command=./task demo", "--save"])

    assert not (tmp_path / "results").exists()


def test_a_command_that_fails_ends_it(repository: Path) -> None:
    """No figure is given for what does not work."""
    with pytest.raises(SystemExit, match=r"\./task fail ended with 1"):
        newcomer.main([f"--repository={repository}", "--command=./task fail"])
