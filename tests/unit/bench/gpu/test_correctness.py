"""What a run of pytest came to, as the correctness part counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import correctness
from bench.gpu.correctness import Selection

TESTS = {
    "passes": "def test_it(): pass",
    "fails": "def test_it(): pass\ndef test_wrong(): assert 1 == 2, 'the sums differ'\ndef test_behind(): pass",
    "is skipped": "import pytest\npytest.skip('needs an NVIDIA GPU', allow_module_level=True)",
    "breaks": "import nowhere_to_be_found",
}


@pytest.fixture
def select(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for tests, in which pytest is run."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(correctness, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "may_skip", "counts", "told"),
    [
        ("passes", False, (1, 0, 0), ""),
        ("fails", False, (1, 1, 0), "the sums differ"),
        ("is skipped", True, (0, 0, 1), ""),
        ("is skipped", False, (0, 1, 1), "pytest ended with exit code 5, 1 skipped"),
        ("breaks", False, (0, 1, 0), "nowhere_to_be_found"),
    ],
)
def test_tests_are_counted(name: str, may_skip: bool, counts: tuple[int, int, int], told: str, select: Path) -> None:
    """The first that fails is the last; on a GPU it is a fault that all are skipped."""
    (select / "test_of_it.py").write_text(TESTS[name])

    found = correctness.tested(Selection(name, ("test_of_it.py",)), 60.0, may_skip=may_skip)

    assert (found["passed"], found["failed"], found["skipped"]) == counts
    assert told in " ".join(found["messages"])
    assert not found["is_cut"]


def test_bfloat16_beside_oracles_comes_first() -> None:
    """And nothing of tests/gpu is selected twice or never."""
    assert correctness.BFLOAT16.arguments == ("tests/gpu/test_paged_attention.py", "-k", "bfloat16")
    assert correctness.REST.arguments == ("tests/gpu", "-k", "not (test_paged_attention and bfloat16)")
