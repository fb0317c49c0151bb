"""The page on tool calls names the parsers and bounds that the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

from services.gateway.config import GatewayConfig
from services.gateway.replies.formats import REASONING_PARSERS
from services.gateway.replies.reply_grammar import MAX_CALLS
from services.gateway.replies.tool_choice import MAX_TOOLS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "tools.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    """Names in the first column of the table with this heading."""
    _, _, table = PAGE.partition(f"| `{heading}` |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`([^`]+)`", row)[0] for row in rows]


def test_every_parser_has_its_row() -> None:
    """But for auto, which is what the last column says."""
    named = get_args(get_type_hints(GatewayConfig)["tool_parser"])

    assert sorted(first_column("--tool-parser")) == sorted(set(named) - {"auto"})
    assert sorted(first_column("--reasoning-parser")) == sorted({*REASONING_PARSERS, "OPEN,CLOSE"} - {"auto"})


def test_its_variables_are_read() -> None:
    """By the names that the gateway's settings have in the environment."""
    named = set(re.findall(r"`THERMOCLINE_([A-Z_]+)`", PAGE))

    assert named == {"TOOL_PARSER", "REASONING_PARSER"}
    assert {name.lower() for name in named} <= set(get_type_hints(GatewayConfig))


def test_bounds_are_those_of_the_code() -> None:
    """Of calls and of tools."""
    assert f"at most {MAX_CALLS} calls" in PAGE
    assert f"more than {MAX_TOOLS:,}" in PAGE
