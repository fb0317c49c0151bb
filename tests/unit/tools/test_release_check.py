"""The check of a release finds what is wrong with one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release_check
from tools.release_check import SDIST_HOLDS, WHEEL_HOLDS
from tools.wheel_trial import ReleaseFault


def archives(folder: Path, in_sdist: list[str], in_wheel: list[str]) -> tuple[Path, Path]:
    """An sdist and a wheel of empty files with these names."""
    sdist, wheel = folder / "thing-1.tar.gz", folder / "thing-1-py3-none-any.whl"
    with tarfile.open(sdist, "w:gz") as packed:
        for name in in_sdist:
            packed.addfile(tarfile.TarInfo(name))
    with zipfile.ZipFile(wheel, "w") as zipped:
        for name in in_wheel:
            zipped.writestr(name, "")
    return sdist, wheel


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a committed file, one that is ignored, and one that is new."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "kept.py").write_text("kept")
    (root / ".gitignore").write_text("*.log\n")
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    (root / "folder").mkdir()
    (root / "folder" / "new.py").write_text("new")
    (root / "left.log").write_text("left over")
    return root


def test_whole_archives_have_no_fault(tmp_path: Path) -> None:
    """Everything that is looked for is there."""
    made = archives(tmp_path, [f"thing-1{end}" for end in SDIST_HOLDS], [f"thing-1{end}" for end in WHEEL_HOLDS])

    assert list(release_check.contents_faults(*made)) == []


def test_what_is_missing_or_too_much_is_named(tmp_path: Path) -> None:
    """One file less in either, and tests in the wheel."""
    in_sdist = [f"thing-1{end}" for end in SDIST_HOLDS[1:]]
    in_wheel = [f"thing-1{end}" for end in WHEEL_HOLDS[1:]]

    faults = list(
        release_check.contents_faults(*archives(tmp_path, in_sdist, [*in_wheel, "tests/conftest.py", "tools/lock.py"]))
    )

    assert faults == [
        f"thing-1.tar.gz has no {SDIST_HOLDS[0]}",
        f"thing-1-py3-none-any.whl has no {WHEEL_HOLDS[0]}",
        "thing-1-py3-none-any.whl has files in tests/",
        "thing-1-py3-none-any.whl has files in tools/",
    ]


def test_the_source_is_what_git_knows_or_would_take(checkout: Path, tmp_path: Path) -> None:
    """What is ignored stays behind."""
    release_check.copy_source(tmp_path / "copy", checkout)

    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert copied == {".gitignore", "kept.py", "folder/new.py"}


def test_changes_keep_a_release_from_being_made(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave alone what lay there."""
    out = tmp_path / "dist"
    out.mkdir()
    (out / "earlier").touch()
    changed = release_check.changes(checkout)
    monkeypatch.setattr(release_check, "changes", lambda: changed)

    with pytest.raises(ReleaseFault, match="folder/"):
        release_check.release(out, [], allows_changes=False)

    assert [path.name for path in out.iterdir()] == ["earlier"]


def test_digests_can_be_checked(tmp_path: Path) -> None:
    """By sha256sum, in its own format; its own file is not among them."""
    (tmp_path / "one").write_bytes(b"1")

    release_check.write_digests(tmp_path)
    release_check.write_digests(tmp_path)

    assert (tmp_path / "SHA256SUMS").read_text() == f"{hashlib.sha256(b'1').hexdigest()}  one\n"


def test_the_pythons_are_the_supported_ones() -> None:
    """The one that runs this is found, wherever it lies."""
    found = release_check.found_pythons()

    assert tuple(found) == ("3.11", "3.12", "3.13", "3.14")
    assert found[f"3.{sys.version_info.minor}"] == sys.executable
