"""The documentation builds as a site, and what is wrong in it is a warning that fails the build."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLAGS = ("--quiet", "--fail-on-warning", "--nitpicky")
EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']*["']""")


def build(source: Path, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """What ``./task docs`` runs, for the pages below ``source``."""
    command = [sys.executable, "-m", "sphinx", *FLAGS, *flags, "-c", str(ROOT / "docs"), str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def pages() -> list[Path]:
    """Every page that the site should have, relative to the checkout."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")]
    return sorted(page.relative_to(ROOT) for page in [*found, ROOT / "models/README.md"])


def test_the_task_builds_as_these_tests_do() -> None:
    """What is asserted below holds for ``./task docs`` too."""
    taskfile = (ROOT / "Taskfile.yml").read_text(encoding="utf-8")

    assert f"sphinx-build {' '.join(FLAGS)} -c docs . build/site" in taskfile


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """All links, anchors and pictures resolve, each page is in the navigation, and the first page loads nothing from
    elsewhere.
    """
    # The site's theme resolves the whole navigation again for every page, which takes as long as much of the rest.
    done = build(ROOT, tmp_path, "-D", "html_theme=basic")

    assert done.returncode == 0, done.stderr
    written = sorted(path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html"))
    assert [page for page in pages() if page not in written] == []
    start = (tmp_path / "docs/index.html").read_text(encoding="utf-8")
    assert EXTERNAL.findall(start) == []
    assert "docs/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    picture = (tmp_path / "docs/how-to/watch.html").read_text(encoding="utf-8")
    assert "_images/ui-overview.png" in picture


@pytest.fixture(scope="module")
def faulty_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the build says of a small site that has every fault, and the folder of its pages."""
    source = tmp_path_factory.mktemp("faulty")
    docs = source / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n\n```{toctree}\nfaulty\nfine\n```\n")
    (docs / "fine.md").write_text(
        "# Fine\n\n## A heading\n\n[itself](#a-heading) [index](index.md) [notes](notes.txt)\n"
    )
    (docs / "notes.txt").write_text("A file that is no page may be linked to.\n")
    (docs / "orphan.md").write_text("# Nobody leads here\n")
    (docs / "faulty.md").write_text(
        "# Faulty\n\n[page](no-page.md)\n\n[there](fine.md#no-heading)\n\n[here](#no-such-heading)\n\n"
        "![picture](no-picture.png)\n\n[file](no-file.conf)\n"
    )
    site = tmp_path_factory.mktemp("site")
    done = build(source, site)
    assert done.returncode != 0
    return done.stderr, site


@pytest.fixture
def complaints(faulty_site: tuple[str, Path]) -> str:
    return faulty_site[0]


def test_the_theme_loads_nothing_from_elsewhere(faulty_site: tuple[str, Path]) -> None:
    """Pages show and search without a network."""
    page = (faulty_site[1] / "docs/index.html").read_text(encoding="utf-8")

    assert "furo" in page
    assert EXTERNAL.findall(page) == []


@pytest.mark.parametrize("fault", ["no-page.md", "no-heading", "no-such-heading", "no-picture.png", "no-file.conf"])
def test_what_does_not_resolve_fails_the_build(complaints: str, fault: str) -> None:
    """Pages, anchors of others and of the page itself, pictures and other files; the warning names the page."""
    assert [line for line in complaints.splitlines() if fault in line and "faulty.md" in line]


def test_a_page_that_the_navigation_lacks_fails_the_build(complaints: str) -> None:
    """It is named; pages with nothing wrong are not."""
    assert re.search(r"orphan\.md.*toctree", complaints)
    assert "fine.md:" not in complaints
