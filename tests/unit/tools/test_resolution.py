"""The dependencies resolve from the public index alone, on every Python and machine that is supported.

These tests ask the package index for metadata, with the environment and every configuration emptied; they are skipped
where it does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from tools import resolution
from tools.lock import read_project, requirements_of
from tools.resolution import MACHINES, NoIndex, Unresolvable, resolve, supported_pythons

PROJECT = read_project()
PYTHONS = supported_pythons(PROJECT["requires-python"])

# Python, machine, and whether with the extra ``dev``.
Case = tuple[str, str, bool]
# What resolves with more requirements resolves with fewer, so that once is enough without the extra.
CASES: list[Case] = [(PYTHONS[0], MACHINES[0], False), *product(PYTHONS, MACHINES, (True,))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty home, which keeps metadata from test to test. Skips without an index."""
    folder = tmp_path_factory.mktemp("home")
    try:
        list(resolve(folder, ["idna"], PYTHONS[0], MACHINES[0]))
    except NoIndex as error:
        pytest.skip(f"the package index does not answer: {str(error).splitlines()[0]}")
    return folder


@pytest.fixture(scope="module")
def resolutions(home: Path) -> Iterator[dict[Case, Future[list[str]]]]:
    """All at once, because each mostly waits for the index."""

    def found(case: Case) -> list[str]:
        python, machine, dev = case
        return list(resolve(home, requirements_of(PROJECT, dev=dev), python, machine))

    with ThreadPoolExecutor(4) as pool:
        yield {case: pool.submit(found, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_they_resolve(resolutions: dict[Case, Future[list[str]]], case: Case) -> None:
    """With the extra ``dev`` and without, from wheels; PyTorch brings CUDA's libraries and its Triton."""
    _, _, dev = case

    found = dict(line.split("==") for line in resolutions[case].result())

    assert found["torch"].startswith("2.13.")
    assert found["triton"] == "3.7.1"
    assert any(name.startswith("nvidia-") for name in found)
    assert ("pytest" in found) == dev


def test_a_conflict_is_found(home: Path) -> None:
    """The one that a stranger met: another Triton than PyTorch's CUDA build allows."""
    seeded = [*requirements_of(PROJECT, dev=False), "triton>=3.9"]

    with pytest.raises(Unresolvable, match="triton"):
        list(resolve(home, seeded, PYTHONS[0], MACHINES[0]))


def test_an_index_that_does_not_answer_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network nothing is claimed about the requirements."""
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "UV_HTTP_RETRIES": "0"}
    monkeypatch.setattr(resolution, "clean_environment", lambda home: {"HOME": str(home), "PATH": "", **nowhere})

    with pytest.raises(NoIndex):
        list(resolve(tmp_path, ["idna"], PYTHONS[0], MACHINES[0]))


def test_nothing_of_our_own_configuration_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variables of pip and uv nor proxies nor a home; certificates do."""
    for name in ("PIP_FIND_LINKS", "PIP_CONFIG_FILE", "UV_INDEX_URL", "SSL_CERT_FILE", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "set")
    for name in set(resolution.CERTIFICATE_VARIABLES) - {"SSL_CERT_FILE"}:
        monkeypatch.delenv(name, raising=False)

    given = resolution.clean_environment(tmp_path)

    assert given.keys() == {"HOME", "PATH", "LANG", "SSL_CERT_FILE"}
    assert given["HOME"] == str(tmp_path)


def test_supported_pythons_are_those_of_the_range() -> None:
    """A range without an end would promise what nobody has tried."""
    assert supported_pythons(">=3.11,<3.15") == ("3.11", "3.12", "3.13", "3.14")
    for open_range in (">=3.11", "<3"):
        with pytest.raises(ValueError, match="lower and an upper bound"):
            supported_pythons(open_range)
