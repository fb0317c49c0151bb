"""A module's tests are found, and lie where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.where import main, misplaced, paths_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    texts = {
        "services/worker/kv/loads.py": "",
        "tests/unit/worker/kv/test_loads.py": "import services.worker.kv.loads",
        "tests/unit/worker/test_loads.py": "from services.worker.kv import loads",
        "tests/unit/worker/made_loads.py": "from services.worker.kv.loads import Loads",
        "tests/unit/gateway/test_loads.py": "from services.worker.kv.loads import Loads",
        "tests/gpu/test_all.py": "from services.worker.kv.loads import Loads",
        "tests/gpu/test_other.py": "from services.worker.kv import pages",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_unit_test_lies_where_its_module_lies() -> None:
    """One that is named for a module of its service is in that module's folder."""
    assert misplaced() == {}


def test_a_test_in_another_folder_is_misplaced(root: Path) -> None:
    """In another service the same name is a coincidence."""
    assert misplaced(root) == {"tests/unit/worker/test_loads.py": "tests/unit/worker/kv"}


def test_the_tests_of_a_module_mirror_or_import_it(root: Path) -> None:
    """What tests share is no test."""
    assert paths_of("services.worker.kv.loads", root) == {
        "tests/gpu/test_all.py": "imports it",
        "tests/unit/gateway/test_loads.py": "imports it",
        "tests/unit/worker/kv/test_loads.py": "mirrors it",
        "tests/unit/worker/test_loads.py": "imports it",
    }


def test_the_command_takes_a_path_or_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """And says how it is used where there is no such module."""
    assert main(["tools/where.py", "tools.where"]) == 0
    assert capsys.readouterr().out == "tests/unit/tools/test_where.py  mirrors it\n"
    assert main(["services.nothing"]) == 2
