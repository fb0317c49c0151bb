"""The README can be read in ninety seconds, has one picture in two schemes, and cites five papers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 700
PEERS = ("vLLM", "SGLang HiCache", "LMCache", "Dynamo", "llama.cpp")
PAPERS = ("HotPrefix", "Strata", "HCache", "IMPRESS", "HyperInfer")


def words(text: str) -> list[str]:
    """Words that a reader sees, those of tables too; not blocks of code, comments, or where links lead."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [word for word in text.split() if re.search(r"\w", word)]


def section(title: str) -> str:
    """What stands under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_words_are_those_that_a_reader_sees() -> None:
    """Tables count; code, comments, rules of tables and addresses do not."""
    text = "# One two\n\n| three | [four five](six) |\n|---|---|\n<!-- seven -->\n```sh\neight nine\n```\n- `ten`"

    assert len(words(text)) == 6


def test_the_readme_is_short() -> None:
    """Fewer words than are read in ninety seconds with its tables."""
    assert len(words(README)) < MOST_WORDS


def test_the_picture_follows_the_reader_s_scheme() -> None:
    """One picture, which states colours of both, and loads nothing."""
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", README)
    drawn = (ROOT / picture).read_text(encoding="utf-8")

    assert "@media (prefers-color-scheme: dark)" in drawn
    assert "<title>" in drawn
    assert set(re.findall(r"https?://[^\"]+", drawn)) == {"http://www.w3.org/2000/svg"}


def test_figures_peers_and_papers_are_there() -> None:
    """Five figures, five other systems with what is missing here, under a date, and five papers, each with a link."""
    figures, peers, papers = (section(title).splitlines() for title in ("Measured", "Beside others", "Papers"))

    assert sum(line.startswith("| [") for line in figures) == 5
    rows = [line for line in peers if line.startswith("| [")]
    assert [re.match(r"\| \[([^]]+)\]", row)[1] for row in rows] == list(PEERS)  # type: ignore[index]
    assert all(row.count(" | ") == 3 and row.rstrip(" |").split(" | ")[3] for row in rows)
    assert re.search(
        r"(January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d", peers[1]
    )
    cited = [line for line in papers if line.startswith("- *")]
    assert [paper for paper in PAPERS for line in cited if f"{paper}" in line.partition("*,")[0]] == list(PAPERS)
    assert all("](" in line for line in cited)


def test_limits_are_said() -> None:
    """Where it runs, what OpenAI clients cannot ask for, where answers are exact, and that no GPU was measured."""
    text = " ".join(README.split())

    for said in (
        "Linux (x86-64, arm64), Python 3.11 to 3.14",
        "refused or absent",
        "In float32 on a CPU",
        "On a GPU",
        "no figure below was measured on one",
    ):
        assert said in text
    assert "Any OpenAI client works" not in text
