"""What was found, made smaller and written where a regression test replays it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tests.fuzz.byte_run import outcome_apart
from tests.fuzz.shrinking import shrink
from tests.fuzz.targets import FoundInput, Target

FOUND = Path(__file__).parent / "found"

FATAL_TRIES = 60
"""Each try of an input that hangs or crashes costs a process."""


def keep(
    found: Sequence[FoundInput], targets: Sequence[Target], folder: Path = FOUND
) -> Iterator[tuple[FoundInput, Path]]:
    """Write one file for each target and failure; yields it and its path."""
    by_name = {target.name: target for target in targets}
    done: set[tuple[str, str]] = set()
    for one in found:
        if (one.target, one.failure) in done:
            continue
        done.add((one.target, one.failure))
        target, failure = by_name[one.target], one.failure
        tries = FATAL_TRIES if failure.startswith(("hangs", "ends the process")) else None
        smaller = _shrunk(target, one, tries)
        digest = hashlib.blake2b(smaller, digest_size=4).hexdigest()
        path = folder / f"{one.target}-{digest}.json"
        path.parent.mkdir(exist_ok=True)
        small = FoundInput(target=one.target, failure=failure, data=smaller, case=one.case)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(small), indent=1) + b"\n")
        yield small, path


def _shrunk(target: Target, found: FoundInput, tries: int | None) -> bytes:
    def still_fails(data: bytes) -> bool:
        return outcome_apart(target, [data])[0] == found.failure

    # One process for each try: what allocates, hangs or crashes must not do so here.
    return shrink(found.data, still_fails, tries=tries or 600)
