"""How long a newcomer waits: a fresh user, a fresh clone, a Python, and the commands of the README.

    env -i PATH="$PATH" .venv/bin/python -m bench.newcomer [--user nobody] [--python /usr/bin/python3.12]
        [--busy-loops 2] [--save [NAME]]

The commands run one after another in a new clone with HOME (an empty folder), PATH (the system's), LANG and
PIP_CONFIG_FILE=/dev/null, and with the variables that name certificates where they are set, because some networks
cannot be left without them; the result says which. The first command sets up ``.venv`` too: ``install_s`` is the time
until that was done, downloads included. Where pip or uv is configured nothing is reported, because the figures would be
this machine's and not a stranger's.

``--busy-loops`` keeps so many processes busy beside the commands, for a machine that others use too. ``--save`` keeps
the figures in ``bench/results/newcomer.json``, or under another name. Needs root where ``--user`` names another user.
Ends with 1 if a command fails.
"""

from __future__ import annotations

import argparse
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results_file

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
UV_SYSTEM_FILES = (Path("/etc/uv/uv.toml"), Path("/etc/xdg/uv/uv.toml"))
COMMANDS = ("./task demo", "./task demo", "./task test")
OUTPUT_LINES = 400
_STAMP = Path(".venv/.thermocline-stamp")  # Written by ./task as soon as everything is installed.


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Who runs the commands, where and with what."""

    clone: Path
    home: Path
    user: str | None
    python: str | None
    torch: str | None

    def environment(self) -> dict[str, str]:
        """What a newcomer's shell has."""
        asked = {"THERMOCLINE_PYTHON": self.python, "THERMOCLINE_TORCH": self.torch}
        return {
            "PATH": SYSTEM_PATH,
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PIP_CONFIG_FILE": os.devnull,
            **{name: os.environ[name] for name in CERTIFICATES if name in os.environ},
            **{name: value for name, value in asked.items() if value},
        }

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output of one command."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.clone,
            env=self.environment(),
            user=self.user,
            group=None if self.user is None else pwd.getpwnam(self.user).pw_gid,
            extra_groups=None if self.user is None else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def timed(self, command: str) -> dict[str, Any]:
        """Seconds of one command and its last line. Raises SystemExit with the end of its output if it fails."""
        begun = time.perf_counter()
        code, output = self.run(command)
        seconds = time.perf_counter() - begun
        lines = output.splitlines()
        if code:
            raise SystemExit("\n".join([*lines[-OUTPUT_LINES:], f"{command} ended with {code}"]))
        last = lines[-1].strip("= ") if lines else ""
        print(f"{command}: {seconds:.1f} s; {last}", flush=True)
        return {"command": command, "seconds": round(seconds, 1), "said": last}


def configured(environ: Mapping[str, str]) -> list[str]:
    """What configures pip or uv for whoever starts this: variables and files."""
    variables = [name for name in environ if name.startswith(("PIP_", "UV_")) and environ[name] != os.devnull]
    return sorted(variables) + [str(path) for path in UV_SYSTEM_FILES if path.exists()]


def pip_settings(newcomer: Newcomer) -> list[str]:
    """The settings that the installed pip goes by, as it says itself, but for the one that switches its files off."""
    code, output = newcomer.run(".venv/bin/python -m pip config list")
    if code:
        return [output.strip()]
    return [line for line in output.splitlines() if line and not line.startswith(":env:.config-file")]


def megabytes(folder: Path) -> int:
    """What the files of a folder take."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(path.stat().st_size for path in paths) / 1e6)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that never rest, until the end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(newcomer: Newcomer, commands: list[str]) -> dict[str, Any]:
    """Run the commands. Raises SystemExit where one fails, or where pip turns out to be configured."""
    begun = time.time()
    rows = [newcomer.timed(command) for command in commands]
    settings = pip_settings(newcomer)
    if settings:
        raise SystemExit("nothing is reported, because pip is configured: " + "; ".join(settings))
    stamp = newcomer.clone / _STAMP
    _, version = newcomer.run(".venv/bin/python --version")
    return {
        "python": version.strip(),
        "torch": newcomer.torch or "default",
        "is_root": (os.getuid() if newcomer.user is None else pwd.getpwnam(newcomer.user).pw_uid) == 0,
        "certificates": sorted(newcomer.environment().keys() & set(CERTIFICATES)),
        "install_s": round(stamp.stat().st_mtime - begun, 1),
        "venv_mb": megabytes(newcomer.clone / ".venv"),
        "commands": rows,
    }


def main(argv: list[str] | None = None) -> None:
    """Clone, run, time, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=str(Path(__file__).parents[1]))
    parser.add_argument("--user", default=None, help="the user that runs it, by default the present one")
    parser.add_argument("--python", default=None, help="path of the Python, by default what ./task finds")
    parser.add_argument("--torch", default=None, help="cpu, or the path of a wheel; by default what pip chooses")
    parser.add_argument("--command", action="append", dest="commands", help=f"default: {', then '.join(COMMANDS)}")
    parser.add_argument("--busy-loops", type=int, default=0, metavar="N")
    parser.add_argument("--save", nargs="?", const="newcomer", default=None, metavar="NAME")
    options = parser.parse_args(argv)
    present = configured(os.environ)
    if present:
        raise SystemExit(
            f"nothing is measured, because pip or uv is configured here: {', '.join(present)}. "
            'Start it with env -i PATH="$PATH", and with the variables of certificates if it needs them'
        )
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        place = Path(name)
        newcomer = Newcomer(place / "thermocline", place / "home", options.user, options.python, options.torch)
        newcomer.home.mkdir()
        subprocess.run(["git", "clone", "--quiet", options.repository, str(newcomer.clone)], check=True)
        if options.user is not None:
            subprocess.run(["chown", "-R", options.user, str(place)], check=True)
        with busy_loops(options.busy_loops):
            found = measure(newcomer, options.commands or list(COMMANDS)) | {"busy_loops": options.busy_loops}
    figures = {name: value for name, value in found.items() if name != "commands"}
    print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    if options.save:
        print("->", results_file.write(options.save, found, seed=0))


if __name__ == "__main__":
    main()
