"""Cases that broke the API, made smaller and written where a regression test replays them."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec

from tests.fuzz.api_cases import Case
from tests.fuzz.api_run import ApiFigures, FoundCase, Server, try_case
from tests.fuzz.shrinking import shrink

FOUND = Path(__file__).parent / "found" / "api"
TRIES = 300
"""Each costs a request."""


async def keep_cases(server: Server, figures: ApiFigures, folder: Path = FOUND) -> list[Path]:
    """Write one file for each failure of a single case; their paths."""
    kept: dict[str, Path] = {}
    for found in figures.found:
        if found.sent is None or found.failure in kept:
            continue
        smaller = msgspec.structs.replace(found, sent=await _shrunk(server, found.sent, found.failure))
        digest = hashlib.blake2b(msgspec.json.encode(smaller), digest_size=4).hexdigest()
        path = kept[found.failure] = folder / f"{found.kind}-{digest}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(smaller), indent=1) + b"\n")
    return list(kept.values())


def read_case(path: Path) -> FoundCase:
    """What :func:`keep_cases` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=FoundCase)


async def _shrunk(server: Server, case: Case, failure: str) -> Case:
    """The case with the smallest body that still fails so; one that is no single whole request stays as it is."""
    head, separator, body = b"".join(case.pieces).partition(b"\r\n\r\n")
    declared = b"Content-Length: %d" % len(body)
    if not body or case.answers != 1 or head.count(declared) != 1:
        return case

    def with_body(other: bytes) -> Case:
        shorter = head.replace(declared, b"Content-Length: %d" % len(other))
        return replace(case, pieces=(shorter + separator + other,))

    loop = asyncio.get_running_loop()

    def still_fails(other: bytes) -> bool:
        trying = asyncio.run_coroutine_threadsafe(try_case(server, with_body(other), {}), loop)
        return trying.result() == failure

    return with_body(await asyncio.to_thread(shrink, body, still_fails, tries=TRIES))
