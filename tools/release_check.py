"""Build a release and try it out: ``python -m tools.release_check`` leaves sdist, wheel, bill of materials and digests.

Everything is made from a copy of what git knows, so that nothing left over in the checkout gets in, by the tools that
are installed (``build --no-isolation``), so that no index is asked. The timestamps are those of the last commit: a
commit gives the same wheel twice. The wheel is then tried (tools/wheel_trial.py): every module of it is imported where
nothing of the checkout is, and it is installed into an empty environment of each Python that is found, from the index
that pip is configured for; there its commands run, and a cell that answers a request and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from thermocline.supervisor.config import BUNDLED_MODEL
from tools import sbom
from tools.lock import read_project
from tools.resolution import supported_pythons
from tools.wheel_trial import ReleaseFault, import_faults, run, try_on

ROOT = Path(__file__).parents[1]

# Ends of names that the archives must hold: one of each kind of file that is not code, and what a source needs.
WHEEL_HOLDS = (
    "thermocline/__main__.py",
    "services/gateway/ui/static/index.html",
    "services/worker/native/decode.c",
    "services/worker/native/element.h",
    "shared/native/xxh3.h",
    "shared/py.typed",
    "thermocline/simulate/profiles/models/llama-3.1-8b.toml",
    f"share/thermocline/models/{BUNDLED_MODEL}/model.safetensors",
    f"share/thermocline/models/{BUNDLED_MODEL}/tokenizer.json",
    ".dist-info/entry_points.txt",
    ".dist-info/licenses/LICENSE",
)
WHEEL_LACKS = ("tests/", "bench/", "docs/", "infra/", "tools/")
SDIST_HOLDS = (
    "/pyproject.toml",
    "/requirements.lock",
    "/requirements-dev.lock",
    "/Taskfile.yml",
    "/task",
    "/CHANGELOG.md",
    "/LICENSE",
    "/tests/conftest.py",
    f"/models/{BUNDLED_MODEL}/model.safetensors",
    "/infra/chart/thermocline/Chart.yaml",
)


def changes(root: Path = ROOT) -> list[str]:
    """What differs from the last commit, a line a file."""
    return run(["git", "-C", str(root), "status", "--porcelain"]).splitlines()


def copy_source(target: Path, root: Path = ROOT) -> None:
    """Copy the files that git knows or would take, and no others."""
    listed = run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in filter(None, listed.split("\0")):
        source, copy = root / name, target / name
        if source.is_file():  # What is deleted and not committed is still listed.
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


def committed_s() -> int:
    """When the last commit was made, in seconds since 1970: the time of all files in an archive."""
    return int(run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]))


def build(source: Path, out: Path, *, epoch_s: int) -> tuple[Path, Path]:
    """Build (sdist, wheel) of ``source`` into the empty folder ``out``. The wheel is built from the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    run(command, environ={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)})
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


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_digests(folder: Path) -> None:
    """SHA256SUMS of the folder's files, as ``sha256sum --check`` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{sha256(path)}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def found_pythons() -> dict[str, str | None]:
    """The supported Pythons, and the path of each that is on PATH; the one that runs this counts too."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {each: shutil.which(f"python{each}") for each in supported_pythons(read_project()["requires-python"])}
    return {each: sys.executable if each == own else path for each, path in found.items()}


def release(out: Path, interpreters: list[str], *, allows_changes: bool) -> None:
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
        epoch_s = committed_s()
        sdist, wheel = build(folder / "source", out, epoch_s=epoch_s)
        faults = list(contents_faults(sdist, wheel))
        if faults:
            raise ReleaseFault("\n".join(faults))
        faults = import_faults(wheel, folder / "unpacked")
        if faults:
            raise ReleaseFault("\n".join(faults))
        for number, interpreter in enumerate(interpreters):
            place = folder / str(number)
            place.mkdir()
            print(f"release: {try_on(interpreter, wheel, folder / 'source', place)}", flush=True)
    sbom.write(out / f"{wheel.name.removesuffix('-py3-none-any.whl')}.cdx.json", epoch_s=epoch_s)
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
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="a Python to try the wheel on (again for more); by default each supported one on PATH",
    )
    options = parser.parse_args(argv)
    interpreters = options.python
    if not interpreters:
        found = found_pythons()
        interpreters = [path for path in found.values() if path]
        for version in (version for version, path in found.items() if not path):
            print(f"release: not tried on Python {version}, which is not on PATH", flush=True)
    try:
        release(options.out, interpreters, allows_changes=options.allow_changes)
    except ReleaseFault as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
