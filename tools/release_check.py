"""Build a release and try it out: ``python -m tools.release_check`` leaves sdist, wheel, bill of materials and digests.

Everything is made from a copy of what git knows, so that nothing left over in the checkout gets in, by the tools that
are installed (``build --no-isolation``), so that no index is asked. The timestamps are those of the last commit: a
commit gives the same wheel twice. The wheel is then installed into an environment of its own, without an index, and
runs there from outside the checkout: its commands, and a cell that answers a request and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from thermocline.supervisor.config import BUNDLED_MODEL
from thermocline.supervisor.ports import any_free
from tools import sbom

ROOT = Path(__file__).parents[1]
STEP_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
_POLL_S = 0.2

_PRINT_MODEL = "from thermocline.supervisor.config import bundled_model; print(bundled_model())"

# Ends of names that the archives must hold: one of each kind of file that is not code, and what a source needs.
WHEEL_HOLDS = (
    "thermocline/__main__.py",
    "services/gateway/ui/static/index.html",
    "shared/py.typed",
    "thermocline/simulate/profiles/models/llama-3.1-8b.toml",
    f"share/thermocline/models/{BUNDLED_MODEL}/model.safetensors",
    f"share/thermocline/models/{BUNDLED_MODEL}/tokenizer.json",
    ".dist-info/entry_points.txt",
    ".dist-info/licenses/LICENSE",
)
WHEEL_LACKS = ("tests/", "bench/", "docs/", "infra/")
SDIST_HOLDS = (
    "/pyproject.toml",
    "/Taskfile.yml",
    "/task",
    "/CHANGELOG.md",
    "/LICENSE",
    "/tests/conftest.py",
    f"/models/{BUNDLED_MODEL}/model.safetensors",
    "/infra/chart/thermocline/Chart.yaml",
)


class ReleaseFault(Exception):
    """Something is wrong with what would be released; the message says what."""


def changes(root: Path = ROOT) -> list[str]:
    """What differs from the last commit, a line a file."""
    return _run(["git", "-C", str(root), "status", "--porcelain"]).splitlines()


def copy_source(target: Path, root: Path = ROOT) -> None:
    """Copy the files that git knows or would take, and no others."""
    listed = _run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in filter(None, listed.split("\0")):
        source, copy = root / name, target / name
        if source.is_file():  # What is deleted and not committed is still listed.
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


def build(source: Path, out: Path, *, epoch_s: int) -> tuple[Path, Path]:
    """Build (sdist, wheel) of ``source`` into the empty folder ``out``. The wheel is built from the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    _run(command, environ={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)})
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def contents_faults(sdist: Path, wheel: Path) -> Iterator[str]:
    """What the archives lack, or have and should not."""
    with tarfile.open(sdist) as archive:
        in_sdist = archive.getnames()
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    for path, names, wanted in ((sdist, in_sdist, SDIST_HOLDS), (wheel, in_wheel, WHEEL_HOLDS)):
        for end in wanted:
            if not any(name.endswith(end) for name in names):
                yield f"{path.name} has no {end}"
    for start in WHEEL_LACKS:
        if any(name.startswith(start) for name in in_wheel):
            yield f"{wheel.name} has files in {start}"


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
    _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)])
    return python


def run_commands(python: Path, folder: Path) -> None:
    """Run the commands that need no cell in ``folder``. Raises ReleaseFault."""
    place = _run([str(python), "-c", "import thermocline; print(thermocline.__file__)"], folder).strip()
    if not Path(place).is_relative_to(python.parents[1]):
        raise ReleaseFault(f"the environment of the wheel imports {place}")
    command = str(python.with_name("thermocline"))
    for arguments in (["version", "--json"], ["--help"], ["up", "--help"], ["doctor"]):
        _run([command, *arguments], folder)
    model = _run([str(python), "-c", _PRINT_MODEL], folder).strip()
    if not Path(model).is_relative_to(python.parents[1]):
        raise ReleaseFault(f"the environment of the wheel would serve {model}")


def serve(python: Path, folder: Path, *flags: str) -> str:
    """Start a cell in ``folder`` with the model that comes along, ask it once, and stop it; returns its answer.

    Raises ReleaseFault when it does not start, answer or stop.
    """
    port = any_free()
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


def _run(command: list[str], folder: Path | None = None, *, environ: dict[str, str] | None = None) -> str:
    """Standard output of a command. Raises ReleaseFault with all that it said when it fails or takes too long."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ or _environment(), capture_output=True, text=True, timeout=STEP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseFault(f"{' '.join(command)} took more than {STEP_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise ReleaseFault(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def write_digests(folder: Path) -> None:
    """SHA256SUMS of the folder's files, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def release(out: Path, *, allows_changes: bool) -> None:
    """Make and check everything in ``out``, which is emptied first. Raises ReleaseFault."""
    changed = changes()
    if changed and not allows_changes:
        raise ReleaseFault("there are changes that are not committed (--allow-changes):\n" + "\n".join(changed))
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_source(folder / "source")
        committed_s = int(_run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]))
        sdist, wheel = build(folder / "source", out, epoch_s=committed_s)
        faults = list(contents_faults(sdist, wheel))
        if faults:
            raise ReleaseFault("\n".join(faults))
        python = install(wheel, folder / "environment")
        run_commands(python, folder)
        answer = serve(python, folder)
        print(f"release: the installed cell answered {answer!r}")
    sbom.write(out / f"{wheel.name.removesuffix('-py3-none-any.whl')}.cdx.json", epoch_s=committed_s)
    write_digests(out)
    for path in sorted(out.iterdir()):
        print(f"release: {path} ({path.stat().st_size} bytes)")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 released, 1 not."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.release_check", description="Build a release and try it out."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files, emptied first")
    parser.add_argument("--allow-changes", action="store_true", help="take what is not committed too, to try it out")
    options = parser.parse_args(argv)
    try:
        release(options.out, allows_changes=options.allow_changes)
    except ReleaseFault as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
