"""The page on loading less: its settings and fields are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec

from services.gateway import admission
from services.gateway.config import GatewayConfig
from services.gateway.importance_gate import SERVED_METHOD
from services.gateway.openai_schema.sampling import IMPORTANCE_FIELDS, CacheOptions
from services.gateway.openai_schema.usage import UsageReport
from shared.config import load
from shared.importance import DEFAULT_METRIC, METRICS
from thermocline.evaluation.__main__ import parser as evaluation_parser
from thermocline.supervisor.config import SupervisorConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "how-to" / "load-less.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference" / "http-api.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def words_of(command: str) -> list[str]:
    """The arguments of a command of ``thermocline`` that the page shows."""
    (line,) = (block for block in blocks("sh") if block.startswith(f"thermocline {command}"))
    return shlex.split(line.replace("\\\n", " "))[2:]


def test_its_command_lines_are_understood() -> None:
    """By ``thermocline up`` and by ``thermocline eval``, which makes the gate that the other demands."""
    words = words_of("up")
    pairs = zip(words[::2], words[1::2], strict=True)
    config = load(SupervisorConfig, "up", flags={flag[2:].replace("-", "_"): value for flag, value in pairs})
    options = evaluation_parser().parse_args(words_of("eval"))

    assert (config.importance, config.sparse) == ("gated", True)
    assert config.importance_gate == str(options.gate)
    assert options.gate_method.partition(":") == (SERVED_METHOD, ":", DEFAULT_METRIC)


def test_its_settings_file_is_understood(tmp_path: Path) -> None:
    """By a gateway, ratios of keys included."""
    file = tmp_path / "cell.toml"
    file.write_text(blocks("toml")[0])
    config = load(GatewayConfig, "gateway", file=file, flags={"model": "m"})

    assert (config.importance, config.importance_ratio) == ("gated", 0.25)
    assert config.ratio_by_key == {"key-of-support": 0.5, "key-of-audit": 0.0}


def test_its_request_and_its_usage_have_the_fields_of_the_schema() -> None:
    """What is sent passes; what comes back decodes without a field that is unknown."""
    (body,) = re.findall(r'extra_body={"cache": ({.*?})}', PAGE)
    admission.check_cache(msgspec.json.decode(body, type=CacheOptions))
    usage = msgspec.json.decode("{" + blocks("json")[0] + "}")["usage"]
    decoded = msgspec.convert(
        usage | {"prompt_tokens_details": usage["prompt_tokens_details"] | {"host_tokens": 0}}, UsageReport
    )

    assert decoded.importance is not None
    assert msgspec.to_builtins(decoded.importance) == usage["importance"]


def test_every_field_and_metric_is_told_on_both_pages() -> None:
    """The reference and the how-to."""
    told = ("fidelity", *IMPORTANCE_FIELDS)

    assert [name for name in told for page in (PAGE, REFERENCE) if f"`{name}`" not in page] == []
    assert [name for name in METRICS if f"`{name}`" not in REFERENCE] == []
