"""Try a wheel as a user would: import every module, run its commands, serve the model that it brings.

Two environments can be made for it. :func:`install` is for tests and needs no index, because it borrows the
dependencies of this environment. :func:`install_afresh` makes an empty one for any Python, and lets its pip fetch
everything: the locked versions first, then the wheel with PyTorch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import httpx

from thermocline.supervisor.ports import free_port
from tools.lock import RUNTIME

STEP_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
INSTALL_TIMEOUT_S = 3600.0  # PyTorch and CUDA's libraries are gigabytes.
_POLL_S = 0.2

_PRINT_MODEL = "from thermocline.supervisor.config import bundled_model; print(bundled_model())"

# Imports the modules that are named, and prints each that fails, or comes from elsewhere than the folder, and why.
_IMPORT_ALL = """
import importlib, sys
folder, packages, *names = sys.argv[1:]
sys.path[:] = [folder, *(path for path in sys.path if path), packages]
for name in names:
    try:
        module = importlib.import_module(name)
        if not (module.__file__ or "").startswith(folder):
            print(f"{name} comes from {module.__file__}")
    except BaseException as error:
        print(f"{name} cannot be imported: {type(error).__name__}: {error}")
"""


class ReleaseFault(Exception):
    """Something is wrong with what would be released; the message says what."""


def modules_in(names: Iterable[str]) -> list[str]:
    """The modules among the names of a wheel's files."""
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names
        if name.endswith(".py") and ".data/" not in name
    )


def import_faults(wheel: Path, folder: Path) -> list[str]:
    """The modules of the wheel that cannot be imported from where it alone is unpacked, with the reason.

    Dependencies come from this environment. Its folder is searched as a plain path: with ``-S`` and ``-I`` nothing in
    it, and no variable, can lead to the checkout.
    """
    packages = sysconfig.get_path("purelib")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        names = modules_in(archive.namelist())
    if not names:
        return [f"{wheel.name} has no modules"]
    return run([sys.executable, "-I", "-S", "-c", _IMPORT_ALL, str(folder), packages, *names], folder).splitlines()


def install_afresh(wheel: Path, lock: Path, interpreter: str, folder: Path) -> Path:
    """Install the locked versions and the wheel into an empty environment of ``interpreter``; returns its Python."""
    run([interpreter, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--require-hashes", "--no-deps", "-r", str(lock)], timeout_s=INSTALL_TIMEOUT_S)
    run([*pip, str(wheel)], timeout_s=INSTALL_TIMEOUT_S)
    return python


def try_on(interpreter: str, wheel: Path, source: Path, folder: Path) -> str:
    """Install the wheel for ``interpreter``, import it all, and serve; returns what was seen. Raises ReleaseFault."""
    begun = time.monotonic()
    python = install_afresh(wheel, source / RUNTIME, interpreter, folder / "environment")
    installed_s = time.monotonic() - begun
    names = modules_in(zipfile.ZipFile(wheel).namelist())
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run([str(python), "-I", "-c", code, *names], folder)
    run_commands(python, folder)
    answer = serve(python, folder)
    version = run([str(python), "--version"]).strip()
    nbytes = sum(path.stat().st_size for path in (folder / "environment").rglob("*") if not path.is_symlink())
    shutil.rmtree(folder / "environment")
    return (
        f"{version}: installed in {installed_s:.0f} s, {nbytes / 1e9:.2f} GB; "
        f"{len(names)} modules imported; the cell answered {answer!r}"
    )


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel alone into a new environment at ``folder``; returns its Python. No index is asked.

    The dependencies are those of the environment that runs this, which the new one looks into behind its own.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    # A plain path: the hooks of our own environment, which lead to the checkout, are not run in this one.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)])
    return python


def run_commands(python: Path, folder: Path) -> None:
    """Run the commands that need no cell in ``folder``. Raises ReleaseFault."""
    place = run([str(python), "-c", "import thermocline; print(thermocline.__file__)"], folder).strip()
    if not Path(place).is_relative_to(python.parents[1]):
        raise ReleaseFault(f"the environment of the wheel imports {place}")
    command = str(python.with_name("thermocline"))
    for arguments in (["version", "--json"], ["--help"], ["up", "--help"], ["doctor"]):
        run([command, *arguments], folder)
    model = run([str(python), "-c", _PRINT_MODEL], folder).strip()
    if not Path(model).is_relative_to(python.parents[1]):
        raise ReleaseFault(f"the environment of the wheel would serve {model}")


def serve(python: Path, folder: Path, *flags: str) -> str:
    """Start a cell in ``folder`` with the model that comes along, ask it once, and stop it; returns its answer.

    Raises ReleaseFault when it does not start, answer or stop.
    """
    port = free_port()
    sizes = ["--threads", "1", "--device-kv-bytes", "16MiB", "--host-kv-bytes", "32MiB"]
    command = [str(python.with_name("thermocline")), "up", "--port", str(port), *sizes, *flags]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            answer = _ask(f"http://127.0.0.1:{port}", process)
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_TIMEOUT_S)
        except (ReleaseFault, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            said = (folder / "up.log").read_text(encoding="utf-8", errors="replace")[-4000:]
            raise ReleaseFault(f"the installed cell failed: {error}\n{said}") from error
        finally:
            if process.poll() is None:
                # Its children end with it: each is told by the system when its parent dies.
                process.kill()
                process.wait(STOP_TIMEOUT_S)
    if code != 0:
        raise ReleaseFault(f"the installed cell ended with exit code {code}")
    return answer


def _ask(url: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + STEP_TIMEOUT_S
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while not _is_ready(client):
            if process.poll() is not None:
                raise ReleaseFault(f"it ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise ReleaseFault(f"it was not ready in {STEP_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
        body["model"] = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        answered = client.post("/v1/completions", json=body).raise_for_status().json()
    if answered["usage"]["completion_tokens"] < 1:
        raise ReleaseFault(f"it answered nothing: {answered}")
    return str(answered["choices"][0]["text"])


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def _environment() -> dict[str, str]:
    """Ours, without what would lead a Python elsewhere than to its own environment."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def run(
    command: list[str],
    folder: Path | None = None,
    *,
    environ: dict[str, str] | None = None,
    timeout_s: float = STEP_TIMEOUT_S,
) -> str:
    """Standard output of a command. Raises ReleaseFault with all that it said when it fails or takes too long."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ or _environment(), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseFault(f"{' '.join(command)} took more than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise ReleaseFault(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
