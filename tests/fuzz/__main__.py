"""Fuzz what takes bytes from outside: ``python -m tests.fuzz bytes --inputs 1000000`` and ``... api --cases 100000``;
and tokens of known texts: ``... texts --cases 1000000``.

With ``--json`` a run that was interrupted goes on where it was when the same command is given again. Exits with 1 if
anything was found; what broke a decoder is made smaller and kept in ``tests/fuzz/found``, where a test replays it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bench import results_file
from tests.fuzz.api_keeping import keep_cases
from tests.fuzz.api_run import BLOCK, ApiFigures, Server, run_cases
from tests.fuzz.api_server import scripted_server
from tests.fuzz.byte_inputs import all_targets
from tests.fuzz.byte_run import ByteFigures, run_block
from tests.fuzz.keeping import keep
from tests.fuzz.text_run import TextFigures, run_texts

BYTE_BLOCK = 20_000
TEXT_BLOCK = 20_000
MOST_FOUND = 50
"""Failures after which a run ends: more would say the same again."""

GROWTH_BYTES = 256.0
"""Bytes a case by which the gateway may grow in a long run, before it is taken for a leak."""

LONG = 40_000
"""Cases from which on growth says something: until then the process warms up. Seed 5 grew by 207 bytes of resident
memory a case in the second half of 20,000, of which objects of Python were 15, and by 51 in the second half of 40,000.
"""

T = TypeVar("T", ApiFigures, ByteFigures, TextFigures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    options = _parser().parse_args(arguments)
    print(f"seed {options.seed}")
    return int(options.run(options))


def _bytes(options: argparse.Namespace) -> int:
    figures = _begun(options, ByteFigures())
    targets = all_targets()
    while figures.inputs < options.inputs and len(figures.found) < MOST_FOUND:
        first = options.first + figures.inputs
        last = options.first + min(figures.inputs + BYTE_BLOCK, options.inputs)
        run_block(options.seed, range(first, last), targets, figures)
        print(f"{figures.inputs} inputs, {figures.per_second():.0f}/s, {len(figures.found)} found", flush=True)
        _note(options, figures)
    for found, path in keep(figures.found, targets):
        print(f"FOUND {found.target} {found.failure}: {found.case}, kept as {path}")
    print(f"slowest: {figures.slowest_ms:.0f} ms, {figures.slowest}")
    _write(options, "bytes", msgspec.to_builtins(figures) | {"inputs_per_second": round(figures.per_second())})
    return 1 if figures.found else 0


def _api(options: argparse.Namespace) -> int:
    figures = _begun(options, ApiFigures())
    asyncio.run(_serve_cases(options, figures))
    for found in figures.found:
        print(f"FOUND {found.kind} {found.failure}: {found.case}")
    growth = figures.growth_bytes_per_case()
    is_leak = figures.cases >= LONG and growth > GROWTH_BYTES
    if is_leak:
        print(f"FOUND the gateway grows by {growth:.0f} bytes a case")
    described = msgspec.to_builtins(figures) | {"cases_per_second": round(figures.per_second())}
    _write(options, "real" if options.real else "api", described | {"growth_bytes_per_case": round(growth, 1)})
    return 1 if figures.found or is_leak else 0


def _texts(options: argparse.Namespace) -> int:
    figures = _begun(options, TextFigures())
    while figures.cases < options.cases and len(figures.found) < MOST_FOUND:
        run_texts(options.seed, options.first + figures.cases, min(TEXT_BLOCK, options.cases - figures.cases), figures)
        print(f"{figures.cases} cases, {figures.per_second():.0f}/s, {len(figures.found)} found", flush=True)
        _note(options, figures)
    for found in figures.found:
        print(f"FOUND {found.kind}, case {found.case}: {found.text!a}")
    _write(options, "texts", msgspec.to_builtins(figures) | {"cases_per_second": round(figures.per_second())})
    return 1 if figures.found else 0


async def _serve_cases(options: argparse.Namespace, figures: ApiFigures) -> None:
    def said(line: str) -> None:
        print(line, flush=True)
        _note(options, figures)

    figures.begin_process()
    async with _server(options) as server:
        while figures.cases < options.cases and len(figures.found) < MOST_FOUND:
            first = options.first + figures.cases
            last = options.first + min(figures.cases + BLOCK, options.cases)
            await run_cases(server, options.seed, range(first, last), figures, said)
        for path in await keep_cases(server, figures):
            print(f"kept {path}")


def _server(options: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[Server]:
    if not options.real:
        return scripted_server()
    from tests.fuzz.real_cell import real_server  # It brings torch, of which nothing else here needs any.

    return real_server()


def _progress(options: argparse.Namespace) -> Path | None:
    """Where an interrupted run is kept: beside the results, by what was asked for."""
    if options.json is None:
        return None
    kind = "real" if getattr(options, "real", False) else options.what
    path: Path = options.json.with_name(f".{options.json.name}.{kind}-{options.seed}-{options.first}.partial")
    return path


def _begun(options: argparse.Namespace, fresh: T) -> T:
    """The figures of the interrupted run, or ``fresh``."""
    path = _progress(options)
    if path is None or not path.exists():
        return fresh
    print(f"going on from {path}")
    return msgspec.json.decode(path.read_bytes(), type=type(fresh))


def _note(options: argparse.Namespace, figures: ApiFigures | ByteFigures | TextFigures) -> None:
    path = _progress(options)
    if path is not None:
        scratch = path.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(figures))
        scratch.replace(path)


def _write(options: argparse.Namespace, part: str, described: dict[str, object]) -> None:
    """Put this part beside the others of the same file: each is a command of its own."""
    if options.json is None:
        return
    known = json.loads(options.json.read_bytes())["results"] if options.json.exists() else {}
    known[part] = {"seed": options.seed, "first": options.first, **described}
    results_file.write("fuzz", dict(sorted(known.items())), seed=options.seed, out=options.json)
    path = _progress(options)
    if path is not None:
        path.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    of_bytes = parts.add_parser("bytes", help="decoders of messages, snapshots, chunks and files")
    of_bytes.add_argument("--inputs", type=int, default=50_000)
    of_bytes.set_defaults(run=_bytes)
    of_api = parts.add_parser("api", help="the gateway's HTTP API")
    of_api.add_argument("--cases", type=int, default=5_000)
    of_api.add_argument("--real", action="store_true", help="against a whole cell with a model, instead of a script")
    of_api.set_defaults(run=_api)
    of_texts = parts.add_parser("texts", help="tokens of known texts against a full encode of every change")
    of_texts.add_argument("--cases", type=int, default=50_000)
    of_texts.set_defaults(run=_texts)
    for each in (of_bytes, of_api, of_texts):
        each.add_argument("--seed", type=int, default=1)
        each.add_argument("--first", type=int, default=0, help="number of the first case")
        each.add_argument("--json", type=Path, help="write figures into this file, and go on after an interruption")
    return parser


if __name__ == "__main__":
    sys.exit(main())
