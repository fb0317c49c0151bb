"""The files of a model directory: its served name, its configuration and its fingerprints.

The fingerprint is the ``model`` part of every namespace, so it covers all that KV depends on: the configuration, the
tokenizer, every byte of the weights, and the epoch of the kernels' numerics (``numerics``). A chat template and the
defaults of sampling change prompts and answers and no KV; they are part of the second one, of answers. Two directories
with equal files have equal fingerprints wherever they are. Weights are large, so their digests can be remembered in a
small JSON file, for as long as path, inode, size, and times of change stay what they were. The time of the inode's
change cannot be set: a file that was replaced by one of equal size and modification time is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shared import progress
from shared.errors import OperatorError
from shared.messages.pools import KvDtype
from shared.messages.worker_events import KernelFacts
from shared.numerics import NUMERICS_EPOCH
from shared.undecodable import UNDECODABLE
from shared.versions import release

FINGERPRINT_VERSION = "thermocline-fingerprint-2"

CACHE_FILE = "weight-digests.json"

CONFIG_FILE = "config.json"

GENERATION_CONFIG_FILE = "generation_config.json"

KV_FILES = (
    CONFIG_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
"""Files other than weights that KV depends on, where they exist."""

ANSWER_FILES = (
    *(GENERATION_CONFIG_FILE, "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/tool_use.jinja",
)
"""Further files that prompts and answers depend on."""

_TEMPLATE_FIELD = "chat_template"  # In the tokenizer_config.json of most models.

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
"""Those that may need the library SentencePiece; tokenizers of tiktoken have files of the first name, too."""

WEIGHTS_FILE = "model.safetensors"

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Names the files of weights that lie in several files."""

_WEIGHTS = "*.safetensors"
_POINTER = b"version https://git-lfs.github.com/spec/"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")

_READ_BYTES = 4 * 1024**2

# A file changed so recently could change once more within one tick of its file system's clock, and keep its
# size and times; such a digest is used but not remembered.
_SETTLED_NS = 2_000_000_000


class _Entry(msgspec.Struct, frozen=True):
    """One remembered digest."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str

    @classmethod
    def of(cls, status: os.stat_result, digest: str) -> _Entry:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest)


class _Cache(msgspec.Struct):
    """The whole cache file: entries by absolute path."""

    version: str = FINGERPRINT_VERSION
    files: dict[str, _Entry] = {}


def model_name(model_dir: Path) -> str:
    """Return the name under which this model is served.

    Its directory's own name, or in the hub's cache that of the model.
    """
    path = Path(os.path.abspath(model_dir))
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.name or "model"


def load_config(model_dir: Path) -> dict[str, Any]:
    """Return ``config.json`` as a dictionary. Raises OperatorError when it is missing or not a JSON object."""
    return _read_object(_directory(model_dir) / CONFIG_FILE)


def load_generation_config(model_dir: Path) -> dict[str, Any]:
    """Return ``generation_config.json`` as a dictionary; an empty one where the model has none."""
    path = _directory(model_dir) / GENERATION_CONFIG_FILE
    return _read_object(path) if path.is_file() else {}


def weight_files(model_dir: Path) -> list[Path]:
    """Return the weight files that are read, in order of name: those that the library finds, else all.

    Files beside those that it finds may be of another save or format. Raises OperatorError when there are none, or only
    pickles or pointers of Git LFS, or when an index names no files, or one that is not there.
    """
    directory = _directory(model_dir)
    found = named_weights(directory) or _stored(directory)
    if not found:
        if any(any(directory.glob(pattern)) for pattern in _PICKLES):
            raise OperatorError(
                f"{directory} holds its weights as pickles, which run what their author wrote when they are read: "
                "convert them to safetensors (Transformers: model.save_pretrained(DIR))"
            )
        raise OperatorError(f"{directory} holds no weights ({_WEIGHTS})")
    pointers = [path.name for path in found if _is_pointer(path)]
    if pointers:
        names = ", ".join(pointers[:4])
        raise OperatorError(
            f"{directory} holds pointers of Git LFS in the place of weights ({names}; {len(pointers)} in all): "
            "git lfs pull fetches them"
        )
    return found


def _is_pointer(path: Path) -> bool:
    """Return whether Git left a few lines that say where the file is stored; False for one that cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER
    return False


def named_weights(directory: Path) -> list[Path]:
    """Return the weight files that the library finds by their names, in order of name; none where it finds none.

    They are the file, or those of the index, that ``config.json`` names, else ``model.safetensors``, else those of its
    index. Raises OperatorError for an index as :func:`weight_files` does.
    """
    config = load_config(directory)
    text = config.get("text_config")
    own = (text if isinstance(text, dict) else config).get("transformers_weights")
    for name in (str(own),) if own else (WEIGHTS_FILE, WEIGHTS_INDEX):
        path = directory / name
        if path.is_file():
            return _indexed(path) if path.suffix == ".json" else [path]
    return []


def _indexed(index: Path) -> list[Path]:
    """Return the files that ``index`` names, in order of name."""
    shards = _read_object(index).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise OperatorError(f"{index} names no files")
    found = [index.parent / name for name in sorted(set(names))]
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        raise OperatorError(f"{index.parent} is incomplete: {index.name} names {', '.join(missing)}")
    return found


def _stored(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(_WEIGHTS) if path.is_file())


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """A model's fingerprint, and the kernels that are part of it."""

    model: str
    kernels: KernelFacts


def fingerprint(
    model_dir: Path,
    cache_dir: Path | None = None,
    *,
    context_tokens: int = 0,
    is_exact: bool = False,
    kv_dtype: KvDtype = "auto",
    epoch: int = NUMERICS_EPOCH,
    clock_ns: Callable[[], int] = time.time_ns,
) -> str:
    """Return the model's fingerprint alone; see :func:`fingerprints`."""
    found = fingerprints(
        model_dir,
        cache_dir,
        context_tokens=context_tokens,
        is_exact=is_exact,
        kv_dtype=kv_dtype,
        epoch=epoch,
        clock_ns=clock_ns,
    )
    return found.model


def fingerprints(
    model_dir: Path,
    cache_dir: Path | None = None,
    *,
    context_tokens: int = 0,
    is_exact: bool = False,
    kv_dtype: KvDtype = "auto",
    epoch: int = NUMERICS_EPOCH,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Fingerprints:
    """Return the hex digest (32 characters) over configuration, tokenizer, all weight bytes and the epoch of numerics.

    The digest without the epoch is in ``kernels``.

    ``cache_dir`` keeps digests of weight files between starts. ``context_tokens`` is the bound on contexts, 0 for none:
    it is part of the digest where it changes KV. So is ``is_exact``: a worker in exact mode must not reuse KV that
    was computed otherwise. And so is a ``kv_dtype`` that rounds KV. Raises OperatorError when the directory is
    missing or incomplete, or when a file cannot be read or changes while it is read.
    """
    directory = _directory(model_dir)
    config = load_config(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise OperatorError(f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
    # Files that are not read count, too: KV on disks was stored under such digests.
    weights = sorted({*_stored(directory), *weight_files(directory)})
    cache = _load_cache(cache_dir)
    before = dict(cache.files)
    digest = hashlib.blake2b(FINGERPRINT_VERSION.encode(), digest_size=16)
    for path in _files(directory, KV_FILES):
        _feed(digest, path.name, _small_digest(path))
    with progress.phase("reading the weights' digests", total=_size(weights), unit="bytes") as advance:
        for path in weights:
            _feed(digest, path.name, _weight_digest(path, cache, advance, clock_ns))
    if has_short_rope(config, context_tokens):
        _feed(digest, "longrope", "short")
    if is_exact:
        _feed(digest, "kernels", "exact")
    if kv_dtype != "auto":
        _feed(digest, "kv", kv_dtype)
    files = digest.hexdigest()
    _feed(digest, "numerics", str(epoch))
    if cache_dir is not None and cache.files != before:
        _save_cache(cache_dir, cache)
    return Fingerprints(digest.hexdigest(), KernelFacts(files=files, epoch=epoch, release=release()))


def answer_fingerprint(model_dir: Path, fingerprint: str) -> str:
    """Return the hex digest (32 characters) over model ``fingerprint``, chat template and defaults of sampling.

    Two cells with equal digests may give the same answer to the same request. Raises as :func:`fingerprint` does.
    """
    directory = _directory(model_dir)
    digest = hashlib.blake2b(FINGERPRINT_VERSION.encode(), digest_size=16)
    _feed(digest, "model", fingerprint)
    for path in _files(directory, ANSWER_FILES):
        _feed(digest, path.name, _file_digest(path)[0])
    return digest.hexdigest()


def _size(files: Sequence[Path]) -> int:
    try:
        return sum(path.stat().st_size for path in files)
    except OSError:
        return 0  # Reading it will raise with the reason.


def has_short_rope(config: Mapping[str, Any], context_tokens: int) -> bool:
    """Return whether a bound on contexts makes a "longrope" model of this configuration use its short factors.

    Without a bound its context is longer than that of pretraining, and it uses its long factors.
    """
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    own = merged.get("max_position_embeddings")
    for field in ("rope_parameters", "rope_scaling"):
        rope = merged.get(field)
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
            continue
        original = rope.get("original_max_position_embeddings", merged.get("original_max_position_embeddings"))
        if isinstance(own, int) and isinstance(original, int):
            return 0 < context_tokens <= original < own
    return False


def _directory(model_dir: Path) -> Path:
    path = Path(model_dir)
    if not path.is_dir():
        raise OperatorError(f"{path} is not a model directory: it does not exist or is no directory")
    if not (path / CONFIG_FILE).is_file():
        raise OperatorError(f"{path} is not a model directory: it has no {CONFIG_FILE}")
    return path


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise OperatorError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise OperatorError(f"{path} is not a JSON object")
    return value


def _files(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = directory / name
        if path.is_file():
            yield path


def _feed(digest: hashlib.blake2b, name: str, part: str) -> None:
    # Lengths go first so that no two different lists of files feed the same bytes.
    for piece in (name.encode(), part.encode()):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)


def _small_digest(path: Path) -> str:
    """Return the digest of a file of :data:`KV_FILES`, without a chat template in it."""
    if path.name == "tokenizer_config.json":
        fields = _read_object(path)
        if _TEMPLATE_FIELD in fields:
            rest = {name: value for name, value in fields.items() if name != _TEMPLATE_FIELD}
            return str(xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode()))
    return _file_digest(path)[0]


def _file_digest(path: Path, advance: Callable[[int], None] = lambda nbytes: None) -> tuple[str, os.stat_result]:
    """Return the xxh3_128 of the file's bytes, and its status.

    Raises OperatorError when it cannot be read or changes meanwhile.
    """
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while block := file.read(_READ_BYTES):
                hasher.update(block)
                advance(len(block))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error}") from error
    if _Entry.of(before, "") != _Entry.of(after, ""):
        raise OperatorError(f"{path} changed while it was read; is it still being written?")
    return str(hasher.hexdigest()), after


def _weight_digest(path: Path, cache: _Cache, advance: Callable[[int], None], clock_ns: Callable[[], int]) -> str:
    """Return the digest of a weight file, from ``cache`` if the file is unchanged; updates ``cache``."""
    key = os.path.realpath(path)
    try:
        status = os.stat(key)
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error}") from error
    known = cache.files.get(key)
    if known is not None and known == _Entry.of(status, known.digest):
        return known.digest
    fresh, status = _file_digest(path, advance)
    if clock_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        cache.files[key] = _Entry.of(status, fresh)
    return fresh


def _load_cache(cache_dir: Path | None) -> _Cache:
    """Return the remembered digests; for a missing, torn or foreign file none."""
    if cache_dir is None:
        return _Cache()
    try:
        cache = msgspec.json.decode((cache_dir / CACHE_FILE).read_bytes(), type=_Cache)
    except (OSError, *UNDECODABLE):
        return _Cache()
    return cache if cache.version == FINGERPRINT_VERSION else _Cache()


def _save_cache(cache_dir: Path, cache: _Cache) -> None:
    """Replace the cache file atomically. A directory that cannot be written costs time, not correctness."""
    temporary = cache_dir / f".{CACHE_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(cache)))
        os.replace(temporary, cache_dir / CACHE_FILE)
    except OSError:
        temporary.unlink(missing_ok=True)
