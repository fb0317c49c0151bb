"""Command lines of ``thermocline cache``: what is understood, and what is refused before anything is sent."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.arguments import whole_number
from shared.errors import OperatorError
from thermocline.cache.__main__ import EXIT_USAGE, main, parser
from thermocline.cache.argument_types import duration_ms, namespace
from thermocline.cache.pin import read_text, read_tokens

TOKENS = ["--tokens-file", "f"]


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("1h", 3_600_000), ("30m", 1_800_000), ("3600s", 3_600_000), ("2d", 172_800_000), ("90", 90_000), ("250ms", 250),
     ("1.5h", 5_400_000)],
)  # fmt: skip
def test_times_have_units(text: str, milliseconds: int) -> None:
    """Seconds without one."""
    assert duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (duration_ms, ["", "h", "0s", "-1h", "1w", "1h30m", "1e3", "400d", "nan"]),
        (namespace, ["", "ab", "AB" * 16, "ab" * 17, "zz" * 16]),
        (whole_number(10), ["", "0", "-1", "11", "1.0", "²"]),
    ],
)
def test_senseless_values_are_refused(read: Callable[[str], object], texts: list[str]) -> None:
    """No time or more than a year; other than 32 hex digits; other than digits, from 1 to the bound."""
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


@pytest.mark.parametrize(
    "argv",
    [[], ["burn"], ["flush", "--tier", "moon"], ["flush", "--namespace", "x"], ["ls", "--limit", "0"], ["pin"],
     ["pin", *TOKENS, "--prompt", "x"], ["pin", *TOKENS, "--ttl", "soon"], ["pin", *TOKENS, "--name", "a b"],
     ["unpin"], ["prewarm"], ["prewarm", "f", "--concurrency", "65"], ["verify", "--storage", "a.b"],
     ["divergences", "--limit", "65"]],
)  # fmt: skip
def test_a_command_line_without_sense_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2 and a line that says why."""
    with pytest.raises(SystemExit) as ended:
        main(argv)

    assert ended.value.code == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("thermocline cache")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "part"),
    [(["pin", "--prompt", "x"], "need --url"), (["pin", "--tokens-file", "/nowhere/f"], "cannot read"),
     (["pin", "--prompt-file", "/nowhere/f", "--url", "http://127.0.0.1:1"], "cannot read"),
     (["pin", "--prompt", "x", "--url", "ftp://x"], "--url"), (["ls", "--model", "/nowhere"], "no such folder"),
     (["divergences", "--model", "/nowhere"], "no such folder"), (["ls", "--model", "."], "cannot load the tokenizer"),
     (["pin", "--prompt", "hello \udcff", "--url", "http://127.0.0.1:1"], "--prompt is not UTF-8"),
     (["prewarm", "/nowhere/f"], "cannot read"),
     (["flush", "--namespace", "ab" * 16, "--salt", "s"], "either")],
)  # fmt: skip
def test_faults_of_the_operator_are_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, and before any broker or gateway is asked."""
    assert main(argv) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("thermocline cache: ")
    assert part in error
    assert error.count("\n") == 1


def test_defaults_are_those_of_the_page() -> None:
    """An hour for a pin; keys come from the environment; device and host are flushed."""
    pin = parser().parse_args(["pin", *TOKENS])
    flush = parser().parse_args(["flush"])

    assert (pin.ttl, pin.name, pin.salt) == (3_600_000, None, "")
    assert (flush.tier, flush.namespace) == (None, None)


def test_keys_come_from_the_environment_and_stay_out_of_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag wins; ``--help`` prints neither."""
    monkeypatch.setenv("THERMOCLINE_ADMIN_KEY", "secret-of-the-environment")
    from_environment = parser().parse_args(["pin", *TOKENS])
    from_flag = parser().parse_args(["pin", *TOKENS, "--admin-key", "other"])
    with pytest.raises(SystemExit):
        main(["pin", "--help"])

    assert (from_environment.admin_key, from_flag.admin_key) == ("secret-of-the-environment", "other")
    assert "secret-of-the-environment" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1.5]", '["a"]', "[true]", "[-1]", f"[{2**31}]"])
async def test_a_file_without_token_ids_is_refused(text: str, tmp_path: Path) -> None:
    """One JSON array of them is wanted."""
    file = tmp_path / "tokens.json"
    file.write_text(text)
    with pytest.raises(OperatorError, match=r"tokens\.json"):
        await read_tokens(file)


async def test_token_ids_are_read(tmp_path: Path) -> None:
    """In their order."""
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([3, 1, 2]))

    assert await read_tokens(file) == [3, 1, 2]


async def test_a_file_that_is_longer_than_any_context_is_refused() -> None:
    """Of one that has no end no more is read than may be."""
    with pytest.raises(OperatorError, match="larger than"):
        await read_text(Path("/dev/zero"))
