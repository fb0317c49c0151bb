"""What the decision record says of imports is what contracts check."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_rule_of_the_table_names_contracts_that_there_are() -> None:
    """No row claims what nothing checks."""
    table = (ROOT / "infra/adr/0026-what-may-import-what.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    file = configparser.ConfigParser()
    file.read(ROOT / ".importlinter")
    contracts = {section.rpartition(":")[2] for section in file.sections()}

    cited = [re.findall(r"`([^`]+)`", checked_by) for _, _, checked_by in rows]
    assert len(rows) > 5
    assert all(cited)
    assert {name for names in cited for name in names} <= contracts
