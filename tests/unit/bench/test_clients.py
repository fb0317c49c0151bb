"""Clients' cases: what counts as working, as refused and as failing."""

import sys
from pathlib import Path

import pytest

from bench.clients import environments
from bench.clients.__main__ import run_cases
from bench.clients.environments import CLIENTS, Client

WRITTEN = """
from bench.clients.harness import BASE_URL, case, check, run

class Refused(Exception):
    def __init__(self, status):
        super().__init__("why")
        self.status_code = status

@case("works")
def works() -> str:
    return BASE_URL

@case("fails")
def fails() -> None:
    check(1 == 2, "one is two")

@case("refused", refuses=True)
async def refused() -> None:
    raise Refused(400)

@case("not known", refuses=True)
def unknown() -> None:
    raise Refused(404)

@case("taken after all", refuses=True)
def taken() -> None:
    pass

run()
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases.py").write_text(WRITTEN, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import a_client_that_is_not_there\n", encoding="utf-8")
    monkeypatch.setattr("bench.clients.__main__.CASES", tmp_path)
    monkeypatch.setitem(CLIENTS, "written", Client((), "cases.py"))
    monkeypatch.setitem(CLIENTS, "broken", Client((), "broken.py"))


@pytest.mark.usefixtures("written")
def test_only_what_was_to_be_refused_and_was_known_counts_as_refused() -> None:
    """Each case has its own outcome, whatever became of those before it."""
    rows = run_cases("written", Path(sys.executable), "http://base", "served")

    assert [row["outcome"] for row in rows] == ["works", "fails", "refused", "fails", "fails"]
    assert rows[0]["detail"] == "http://base"
    assert "one is two" in rows[1]["detail"]


@pytest.mark.usefixtures("written")
def test_a_process_that_breaks_off_is_a_case_that_fails() -> None:
    """A client that cannot be imported must not look like one without cases."""
    (row,) = run_cases("broken", Path(sys.executable), "http://base", "served")

    assert row["outcome"] == "fails"
    assert "a_client_that_is_not_there" in row["detail"]


def test_every_client_has_its_cases() -> None:
    """As a file of the folder."""
    assert all((environments.CASES / client.cases).is_file() for client in CLIENTS.values())
