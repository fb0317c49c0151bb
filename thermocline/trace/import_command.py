"""Flags and output of ``thermocline trace import``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from shared.errors import ConfigError
from shared.progress_line import shown
from thermocline.flags import add_json
from thermocline.trace.conversion import LEAST_BYTES, MOST_BYTES
from thermocline.trace.importing import FORMATS, Import, Report, import_log

_SHOWN_EVERY_BYTES = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``import``."""
    parser.add_argument("path", type=Path, metavar="FILE", help="log, one JSON object a line")
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of the lines")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="trace to write, in Mooncake's format")
    parser.add_argument(
        "--salt-file", type=Path, metavar="FILE", help="salt of the names of blocks; drawn and forgotten if not given"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="count tokens by a model's tokenizer.json")
    parser.add_argument(
        "--bytes-per-token", type=float, metavar="X", help="size of a token of text; measured by the log's usage"
    )
    parser.add_argument(
        "--max-malformed", type=int, default=100, metavar="N", help="malformed lines to leave out before refusing"
    )
    add_json(parser)


def run_import(options: argparse.Namespace) -> None:
    """Import a log and print a report. Raises ConfigError for a bad flag, and the errors of :func:`import_log`."""
    least, most = LEAST_BYTES, MOST_BYTES
    if options.bytes_per_token is not None and not least <= options.bytes_per_token <= most:
        raise ConfigError(f"--bytes-per-token must be from {least:g} to {most:g}")
    if options.max_malformed < 0:
        raise ConfigError("--max-malformed must be at least 0")
    asked = Import(
        log=options.path,
        format=options.format,
        out=options.out,
        salt_file=options.salt_file,
        tokenizer=options.tokenizer,
        bytes_per_token=options.bytes_per_token,
        most_malformed=options.max_malformed,
    )
    report = _with_progress(asked)
    for number, reason in report.malformed:
        print(f"thermocline trace: {options.path}:{number}: {reason}; left out", file=sys.stderr)
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(Console(), report, asked)


def _with_progress(asked: Import) -> Report:
    """Import the log; show progress on standard error where that is a terminal."""
    size = os.path.getsize(asked.log) if os.path.isfile(asked.log) else None
    with shown(f"bytes of {asked.log.name}", size) as bar:
        drawn = 0

        def progress(read: int) -> None:
            nonlocal drawn
            if read - drawn >= _SHOWN_EVERY_BYTES:
                drawn = read
                bar.update(read, size)

        return import_log(asked, progress)


def _show(console: Console, report: Report, asked: Import) -> None:
    facts = report.facts
    table = Table(title=f"{asked.log} as {asked.out}", title_justify="left", show_header=False)
    table.add_row("lines / malformed, left out", f"{report.lines:,} / {len(report.malformed):,}")
    table.add_row("requests", f"{facts.requests:,} in {report.seconds:,.1f} s")
    table.add_row("prompt / output tokens", f"{facts.prompt_tokens:,} / {facts.output_tokens:,}")
    if facts.counted_by_server:
        counted = f"{facts.their_prompt_tokens:,} / {facts.server_prompt_tokens:,}"
        table.add_row("prompt tokens, here / by the server's usage", counted)
    if report.bytes_per_token is not None:
        table.add_row("bytes of text per token", f"{report.bytes_per_token:g}, {report.bytes_per_token_source}")
    table.add_row("names of blocks", f"{facts.blocks:,}")
    for name, count in (
        ("answers measured by their text", facts.outputs_from_text),
        ("answers taken to be as long as max_tokens", facts.outputs_from_limit),
        ("images and other parts without a length", facts.other_parts),
        ("requests out of order by more than is held back", report.out_of_order),
    ):
        if count:
            table.add_row(name, f"{count:,}")
    console.print(table)
