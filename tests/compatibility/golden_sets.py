"""Golden sets: bytes of a release, and what they meant to it. One folder a release; ``record`` makes them.

The set of the version in development is recorded again whenever it grows. Once the release is out, its digest goes
into ``RELEASED``, and its files never change again.

Files named ``.bin`` are compressed by zlib. ``messages.bin`` maps names of types to the bytes of one message each
(msgpack), ``chunk-*.bin`` are blobs, ``snapshot.bin`` is an object of the broker's bucket and ``recording.bin`` a file
of ``thermocline record``. ``messages.jsonl`` describes the types of messages, one a line, and ``facts.json``
is all the rest.
"""

from __future__ import annotations

import hashlib
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.version import Version

from tests.compatibility.made_chunks import ChunkFacts
from tests.compatibility.schema import MessageSchema, Schema

FOLDER = Path(__file__).parent / "golden"
_ROOT = Path(__file__).parents[2]
_FACTS = "facts.json"
_SCHEMA = "messages.jsonl"

RELEASED = {
    "0.1.0": "c4c6f4df080791f46c2e4951077615878285d6cdb4bf0558f44dac91a3772882",
    "0.2.0": "7dc2ef493e52acd0a2c05bdcaf08333a98cf3ac9fe6bbc69c9f693aa34f234af",
}
"""Digests of the sets of releases that are out."""


class Released(Exception):
    """A set that must never change was about to be written."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a set's bytes meant when they were written. ``formats`` are versions, ``major.minor``, by name."""

    release: str
    formats: dict[str, str]
    chunks: dict[str, ChunkFacts]


@dataclass(frozen=True)
class GoldenSet:
    """One release's."""

    facts: Facts
    schema: Schema
    messages: dict[str, bytes]
    chunks: dict[str, bytes]
    snapshot: bytes
    recording: bytes

    def major(self, name: str) -> int:
        return int(self.facts.formats[name].partition(".")[0])

    def minor(self, name: str) -> int:
        return int(self.facts.formats[name].partition(".")[2])


def current_release() -> str:
    """The release that the version in ``pyproject.toml`` leads to: ``0.3.0`` of ``0.3.0.dev0``.

    What is installed may be older than the checkout, so it is not asked.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return Version(project["version"]).base_version


def releases() -> list[str]:
    """Those that have a set, oldest first."""
    return sorted((path.parent.name for path in FOLDER.glob(f"*/{_FACTS}")), key=Version)


def digest(release: str, folder: Path = FOLDER) -> str:
    """SHA-256 over the names and bytes of a set's files, in hexadecimal digits."""
    whole = hashlib.sha256()
    for path in sorted((folder / release).iterdir()):
        data = path.read_bytes()
        whole.update(f"{path.name} {len(data)}\n".encode() + data)
    return whole.hexdigest()


def load(release: str, folder: Path = FOLDER) -> GoldenSet:
    place = folder / release
    facts = msgspec.json.decode((place / _FACTS).read_bytes(), type=Facts)
    return GoldenSet(
        facts=facts,
        schema={
            line.name: line for line in msgspec.json.Decoder(MessageSchema).decode_lines((place / _SCHEMA).read_bytes())
        },
        messages=msgspec.msgpack.decode(_read(place / "messages.bin"), type=dict[str, bytes]),
        chunks={name: _read(place / f"chunk-{name}.bin") for name in facts.chunks},
        snapshot=_read(place / "snapshot.bin"),
        recording=_read(place / "recording.bin"),
    )


def save(golden: GoldenSet, folder: Path = FOLDER) -> Path:
    """Write a set in the place of any that its release has; returns where. Raises Released."""
    if golden.facts.release in RELEASED:
        raise Released(f"release {golden.facts.release} is out, so its golden set stays as it is")
    place = folder / golden.facts.release
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    files = {"messages": msgspec.msgpack.encode(golden.messages, order="sorted")}
    files |= {f"chunk-{name}": blob for name, blob in golden.chunks.items()}
    files |= {"snapshot": golden.snapshot, "recording": golden.recording}
    for name, data in files.items():
        (place / f"{name}.bin").write_bytes(zlib.compress(data, 9))
    (place / _SCHEMA).write_bytes(msgspec.json.Encoder().encode_lines(golden.schema.values()))
    (place / _FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(golden.facts), indent=1) + b"\n")
    return place


def _read(path: Path) -> bytes:
    return zlib.decompress(path.read_bytes())
