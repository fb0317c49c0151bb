"""Shipped packages hold what commands reach, and what is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import unused

SHIPPED = {
    "thermocline/__main__.py": "TARGETS = ('services.named:start', 'services.whole')\ndef main(): return TARGETS",
    "services/named.py": "from services.kept import thing\nfrom services import values\n"
    "def start(): return thing, values.one",
    "services/kept/__init__.py": "from services.kept.inner import thing",
    "services/kept/inner.py": "def thing(): return _inside()\ndef _inside(): return Kept().used()\n"
    "class Kept:\n    def used(self): ...\n    def measured(self): ...\n"
    "    def shown(self): ...\n    def unused(self): ...",
    "services/values.py": "one = 1\ntwo = 2",
    "services/whole.py": "def anything(): ...",
    "services/dead.py": "from services.kept import thing\n"
    "def left(): return right()\ndef right(): return thing, left()",
    "services/library.py": "from asyncio import Protocol as Base\n"
    "class Called(Base):\n    def data_received(self): ...\nCalled()",
    "services/registry.py": "KINDS = []\ndef register(kind): return kind\nKINDS.append(register)",
    "services/registered.py": "from services.registry import register\n@register\nclass Kind: ...",
    "bench/measure.py": "from services.dead import left\nleft.measured()",
    "docs/templates/page.j2": "{{ kept.shown }}",
    "tests/test_dead.py": "from services.dead import right\nright.unused()",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SHIPPED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_public_name_is_used_or_explained() -> None:
    """What nothing uses goes; after that `EXPLAINED` says of the rest why it stays."""
    assert unused.unexplained(unused.unused()) == []


def test_what_only_one_another_tests_and_benchmarks_use_is_found(root: Path) -> None:
    """Names in a circle, values, and methods; not what imports, strings, pages, benchmarks or libraries reach."""
    assert unused.unused(root) == [
        "services.dead.left",
        "services.dead.right",
        "services.kept.inner.Kept.unused",
        "services.library.Called",
        "services.values.two",
    ]


def test_an_explanation_covers_what_lies_within_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer name that begins alike is another one."""
    monkeypatch.setattr(unused, "EXPLAINED", {"services.a": "why", "services.gone": "why"})

    faults = unused.unexplained(["services.a.one", "services.ab.two"])

    assert faults == ["services.ab.two", "services.gone is explained for nothing"]
