"""How long a newcomer waits: a fresh user, a fresh clone, a Python, and the commands of the README.

    python -m bench.newcomer [--repository .] [--user nobody] [--command "./task demo"]... [--save]

Commands run one after another in a new clone, with an empty home, no variables but those that name a package index to
pip, and a ``PATH`` of the system alone. The first sets up ``.venv`` too, which is mostly the time of downloading and
unpacking PyTorch. Needs root where ``--user`` names somebody else. Ends with 1 if a command fails.
"""

from __future__ import annotations

import argparse
import os
import pwd
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import results_file

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
COMMANDS = ("./task demo", "./task demo", "./task test")
OUTPUT_LINES = 40


def environment(home: Path) -> dict[str, str]:
    """What a newcomer's shell has."""
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {"PATH": SYSTEM_PATH, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", **index}


def timed(command: str, folder: Path, home: Path, user: str | None) -> float:
    """Seconds of one command. Raises SystemExit with the end of its output if it fails."""
    begun = time.perf_counter()
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=environment(home),
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.perf_counter() - begun
    lines = done.stdout.splitlines()
    if done.returncode:
        raise SystemExit("\n".join([*lines[-OUTPUT_LINES:], f"{command} ended with {done.returncode}"]))
    print(f"{command}: {seconds:.1f} s; {lines[-1] if lines else ''}", flush=True)
    return seconds


def main() -> None:
    """Clone, run, time, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=str(Path(__file__).parents[1]))
    parser.add_argument("--user", default=None, help="who runs it (default: whoever runs this)")
    parser.add_argument("--command", action="append", dest="commands", help=f"default: {', then '.join(COMMANDS)}")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        place = Path(name)
        home, clone = place / "home", place / "thermocline"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", options.repository, str(clone)], check=True)
        python = subprocess.run(
            ["/bin/sh", "-c", "python3 --version"], env=environment(home), capture_output=True, text=True
        ).stdout.strip()
        if options.user is not None:
            subprocess.run(["chown", "-R", options.user, str(place)], check=True)
        rows = [
            {"command": command, "seconds": round(timed(command, clone, home, options.user), 1)}
            for command in options.commands or COMMANDS
        ]
    found = {"python": python, "is_other_user": options.user is not None, "commands": rows}
    if options.save:
        print("->", results_file.write("newcomer", found, seed=0))


if __name__ == "__main__":
    sys.exit(main())
