"""LoRA adapters in the PEFT format: their description, without the weights, and the digest that identifies them.

An adapter adds ``scale * B @ A @ x`` to what some linear layers of the base model make of x (LoRA, Hu et al. 2021,
section 4.1). It is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. Settings of PEFT
that workers do not compute are refused here, by name. The digest covers every byte of both files and is a part of
namespaces: KV is shared only by requests with the same adapter, under any name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shared.adapter_patterns import Patterns
from shared.errors import AdapterRefused
from shared.ids import DIGEST_BYTES
from shared.undecodable import UNPARSABLE

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

MOST_CONFIG_BYTES = 2**20
MOST_HEADER_BYTES = 16 * 2**20
"""Bound of a header, which names every tensor; adapters with thousands of tensors have less than a megabyte."""

MOST_ADAPTERS = 256
"""Names of adapters in a cell; status and snapshots have all of them."""

_MOST_COUNT = 2**31
"""Bound of ranks and of sizes of tensors: beyond it they are no floats that can be computed with."""

_MOST_NAME = 1024
"""Characters of a tensor's name."""

_PREFIX = "base_model.model."
_PARTS = (".lora_A.weight", ".lora_B.weight")
_DTYPES = ("F32", "F16", "BF16")
_READ_BYTES = 4 * 2**20

_READ_KEYS = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern",
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "layers_to_transform",
})  # fmt: skip
"""Keys of the configuration that :func:`_config` reads."""

_HARMLESS_KEYS = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "megatron_config",
    "megatron_core", "runtime_config", "peft_version", "qalora_group_size", "layers_pattern", "eva_config",
})  # fmt: skip
"""Keys without effect on an adapter that is loaded for inference. Any other key must have a value that turns it off."""

_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the weights of the base model alone.

EVA (Paischer et al. 2024) takes A from singular vectors of a layer's inputs, and B is 0.
"""

_CHANGING_STARTS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Beginnings of the names of initialisations that take something away from the weights of the base model."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter may have this name: the syntax of model ids, at most 128 characters."""
    return bool(_NAME.fullmatch(name))


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One linear layer that is adapted: A is [rank, inputs], B is [outputs, rank]."""

    name: str
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The description of an adapter. ``digest`` is 32 hex digits, ``nbytes`` the size of its weights as float32."""

    directory: Path
    digest: str
    modules: tuple[AdaptedModule, ...]

    @property
    def rank(self) -> int:
        """Largest rank of any module."""
        return max(module.rank for module in self.modules)

    @property
    def nbytes(self) -> int:
        """Bytes of the A and B matrices of all modules as float32."""
        return sum(4 * module.rank * (module.inputs + module.outputs) for module in self.modules)


def read_adapter(directory: Path) -> AdapterFiles:
    """Return the description of an adapter's files. Raises AdapterRefused for one that cannot be served exactly."""
    config = _config_bytes(directory)
    with _weights(directory) as file:
        size = os.fstat(file.fileno()).st_size
        digest, header = _begun(config, size), file.read(8)
        header += file.read(_header_length(file.name, header, size))
        digest.update(header)
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return _described(directory, config, header, digest.hexdigest())


def load_adapter(directory: Path, most_bytes: int) -> tuple[AdapterFiles, bytes]:
    """Return the same, with the bytes of the weights' file that the digest covers.

    Raises AdapterRefused also where that file has more than ``most_bytes``.
    """
    config = _config_bytes(directory)
    with _weights(directory) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise AdapterRefused(f"{file.name} has {size} bytes, and there is room for {most_bytes}")
        weights = file.read(most_bytes + 1)
    digest = _begun(config, len(weights))
    digest.update(weights)
    header = weights[: 8 + _header_length(file.name, weights[:8], len(weights))]
    return _described(directory, config, header, digest.hexdigest()), weights


def _begun(config: bytes, weight_bytes: int) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"tc-adapter-1")
    # The lengths go first so that no two different pairs of files feed the same bytes.
    digest.update(len(config).to_bytes(8, "little") + weight_bytes.to_bytes(8, "little") + config)
    return digest


def _described(directory: Path, config: bytes, header: bytes, digest: str) -> AdapterFiles:
    patterns = Patterns()
    parsed = _config(_read_config(directory, config), patterns)
    modules = tuple(_modules(parsed, _shapes(directory / WEIGHTS_FILE, header), patterns))
    return AdapterFiles(directory, digest, modules)


@contextmanager
def _weights(directory: Path) -> Iterator[BinaryIO]:
    path = directory / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise AdapterRefused(f"{directory} holds no readable {WEIGHTS_FILE}: {error.strerror or error}") from error


def _header_length(name: str, first: bytes, size: int) -> int:
    """Return the bytes of the header from the first eight bytes of the file.

    Raises AdapterRefused for an invalid one.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
        raise AdapterRefused(f"{name} is no safetensors file")
    return length


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of a module's A and B in the weights' file."""
    return f"{_PREFIX}{module}{_PARTS[0]}", f"{_PREFIX}{module}{_PARTS[1]}"


@dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    layers: frozenset[int] | None  # None is all of them.
    is_rank_stabilised: bool


def _config_bytes(directory: Path) -> bytes:
    path = directory / CONFIG_FILE
    try:
        with path.open("rb") as file:
            config = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRefused(f"{directory} holds no readable {CONFIG_FILE}: {error.strerror or error}") from error
    if len(config) > MOST_CONFIG_BYTES:
        raise AdapterRefused(f"{path} is larger than {MOST_CONFIG_BYTES} bytes")
    return config


def _read_config(directory: Path, config: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(config)
    except UNPARSABLE as error:
        raise AdapterRefused(f"{directory / CONFIG_FILE} is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterRefused(f"{directory / CONFIG_FILE} is no JSON object")
    return raw


def _config(raw: Mapping[str, Any], patterns: Patterns) -> _Config:
    """Return the parsed configuration. Raises AdapterRefused with every reason at once."""
    reasons = list(_reasons_against(raw, patterns))
    if reasons:
        raise AdapterRefused(f"this adapter cannot be served exactly: {'; '.join(reasons)}")
    return _Config(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        ranks=raw.get("rank_pattern") or {},
        alphas=raw.get("alpha_pattern") or {},
        targets=_as_names(raw["target_modules"]),
        excluded=_as_names(raw.get("exclude_modules") or []),
        layers=_as_layers(raw.get("layers_to_transform")) or None,
        is_rank_stabilised=bool(raw.get("use_rslora")),
    )


def _reasons_against(raw: Mapping[str, Any], patterns: Patterns) -> Iterator[str]:
    if raw.get("peft_type") != "LORA":
        yield f"peft_type is {raw.get('peft_type')!r}, and only LORA is served"
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type is {raw.get('task_type')!r}, and only CAUSAL_LM is served"
    if not _is_count(raw.get("r")):
        yield "r is no rank"
    if not _is_number(raw.get("lora_alpha")):
        yield "lora_alpha is no number"
    if raw.get("bias", "none") != "none":
        yield "it changes biases (bias), which is not served"
    if raw.get("fan_in_fan_out"):
        yield "its layers are transposed (fan_in_fan_out), which is not served"
    start = raw.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        changes = isinstance(start, str) and start.lower().startswith(_CHANGING_STARTS)
        does = "changes weights of the base model" if changes else "is not known to leave the base model alone"
        yield f"init_lora_weights {start!r} {does}"
    if not _is_names(raw.get("target_modules"), patterns):
        yield "target_modules names no modules"
    if raw.get("exclude_modules") and not _is_names(raw["exclude_modules"], patterns):
        yield "exclude_modules names no modules"
    layers = raw.get("layers_to_transform")
    if layers is not None and _as_layers(layers) is None:
        yield "layers_to_transform are no numbers of layers"
    for key, is_fine in (("rank_pattern", _is_count), ("alpha_pattern", _is_number)):
        given = raw.get(key) or {}
        if not isinstance(given, dict) or not all(map(is_fine, given.values())):
            yield f"{key} does not give numbers to modules"
        else:
            faults = ((pattern, patterns.fault_of(pattern)) for pattern in given)
            yield from (f"{key} has the pattern {pattern[:80]!r}: {fault}" for pattern, fault in faults if fault)
    for key, value in raw.items():
        # A key that is off has one of these values, in every release of PEFT so far.
        if key not in _READ_KEYS and key not in _HARMLESS_KEYS and value not in (None, False, [], {}, ""):
            yield f"{key} is not served"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_COUNT


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # An integer beyond all floats.
        return False


def _is_names(value: object, patterns: Patterns) -> bool:
    """Return whether a value is one pattern, or a list of names."""
    if isinstance(value, str):
        return bool(value) and not patterns.fault_of(value)
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _as_names(value: str | list[str]) -> str | frozenset[str]:
    return value if isinstance(value, str) else frozenset(value)


def _as_layers(value: object) -> frozenset[int] | None:
    """Return numbers of layers, empty for an empty list, or None where it is something else."""
    numbers = value if isinstance(value, list) else [value]
    found = [each for each in numbers if isinstance(each, int) and not isinstance(each, bool)]
    return frozenset(found) if value is not None and len(found) == len(numbers) else None


def _shapes(path: Path, head: bytes) -> dict[str, list[int]]:
    """Return the shapes of all tensors of a safetensors file by name, from its first eight bytes and its header."""
    try:
        header = json.loads(head[8:])
    except UNPARSABLE as error:
        raise AdapterRefused(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise AdapterRefused(f"{path} is no safetensors file")
    shapes = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if len(name) > _MOST_NAME:
            raise AdapterRefused(f"{path} names a tensor with more than {_MOST_NAME} characters")
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(_is_count(each) for each in shape):
            raise AdapterRefused(f"{path}: {name} has no shape")
        if entry.get("dtype") not in _DTYPES:
            raise AdapterRefused(f"{path}: {name} is of type {entry.get('dtype')}, not one of {', '.join(_DTYPES)}")
        shapes[name] = shape
    return shapes


def _modules(config: _Config, shapes: Mapping[str, list[int]], patterns: Patterns) -> Iterator[AdaptedModule]:
    """Yield every module that has weights in the file, in order of name. Raises AdapterRefused."""
    names: set[str] = set()
    for tensor in shapes:
        part = next((part for part in _PARTS if tensor.endswith(part)), None)
        if part is None or not tensor.startswith(_PREFIX):
            raise AdapterRefused(f"the file holds {tensor}, which is no weight of a low-rank pair")
        names.add(tensor.removeprefix(_PREFIX).removesuffix(part))
    if not names:
        raise AdapterRefused("the file holds no weights")
    for name in sorted(names):
        if not _is_targeted(config, name, patterns):
            raise AdapterRefused(f"the file holds weights of {name}, which the configuration does not target")
        rank = int(_by_pattern(config.ranks, name, config.rank, patterns))
        alpha = float(_by_pattern(config.alphas, name, config.alpha, patterns))
        # Rank-stabilised LoRA divides by the root (Kalajdzievski 2023, section 3).
        scale = alpha / (math.sqrt(rank) if config.is_rank_stabilised else rank)
        yield _module(name, rank, scale, *(shapes.get(tensor) for tensor in tensor_names(name)))


def _module(name: str, rank: int, scale: float, a: list[int] | None, b: list[int] | None) -> AdaptedModule:
    if a is None or b is None or len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        raise AdapterRefused(f"{name} has A of shape {a} and B of shape {b}, which are no pair of rank {rank}")
    return AdaptedModule(name=name, rank=rank, inputs=a[1], outputs=b[0], scale=scale)


def _by_pattern(values: Mapping[str, Any], name: str, otherwise: float, patterns: Patterns) -> float:
    """Return the value of the first pattern that matches the end of a name, at a dot, as PEFT matches them."""
    found: float = next((value for key, value in values.items() if patterns.ends_name(key, name)), otherwise)
    return found


def _is_targeted(config: _Config, name: str, patterns: Patterns) -> bool:
    if config.layers is not None:
        # A longer number is that of no layer, and Python parses no number of thousands of digits.
        number = next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)
        if number not in config.layers:
            return False
    is_all = isinstance(config.targets, str) and config.targets.lower() == "all-linear"
    return (is_all or _is_named(config.targets, name, patterns)) and not _is_named(config.excluded, name, patterns)


def _is_named(names: str | frozenset[str], name: str, patterns: Patterns) -> bool:
    """Return whether a pattern matches a name, or one of some names is it or its end at a dot."""
    if isinstance(names, str):
        return patterns.is_name(names, name)
    dots = (place + 1 for place, character in enumerate(name) if character == ".")
    return any(name[start:] in names for start in (0, *dots))
