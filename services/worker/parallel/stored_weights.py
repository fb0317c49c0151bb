"""The tensors of a checkpoint by the names that the model has for them; a rank reads its part alone.

Hugging Face's conversions say how a checkpoint's names and tensors become the model's. Renamed tensors are served, and
weights of experts that the checkpoint has one by one: the model has them as one tensor ``[experts, rows, columns]``,
where the rows of two (gate and up) follow one another; or as one tensor whose rows are the model's columns. Other
conversions compute with whole tensors: models that need them are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from services.worker.engine.quantised.codes import Codes
from services.worker.engine.quantised.formats import (
    Meaning,
    Settings,
    check_plain,
    dequantised,
    is_quantised,
    layer_of,
    name_of,
    none_quantised,
    read_layer,
    weight_name,
    weight_shape,
)
from services.worker.engine.text_parts import tensor_names
from shared.errors import UnsupportedModel
from shared.logs import get_logger
from shared.model_files import load_config, weight_files
from shared.quantisation import method_of, settings_of

_log = get_logger("worker.engine")


class Stored(Protocol):
    """One tensor of the model, as the checkpoint stores it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's tensor, known before anything is read."""

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Read these ``parts`` of dimension ``dim`` (-1 or -2) one after the other, all of the others."""

    def whole(self) -> torch.Tensor:
        """Read the whole tensor."""


class StoredTensor:
    """A tensor that the checkpoint stores in the model's form."""

    def __init__(self, opened: Any, name: str) -> None:
        """Find the tensor ``name`` in ``opened``, a safetensors file that stays open for later reads."""
        self._slice = opened.get_slice(name)
        self.shape = tuple(int(size) for size in self._slice.get_shape())

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Read the parts one by one, and join them where there are several."""
        before = (slice(None),) * (len(self.shape) + dim)
        pieces = [self._slice[(*before, slice(part.start, part.stop))] for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self) -> torch.Tensor:
        """Read the whole tensor, which may be a scalar."""
        tensor: torch.Tensor = self._slice[:] if self.shape else self._slice[...]
        return tensor


class QuantisedTensor:
    """The weight [outputs, inputs] of a quantised layer. A read takes the layer's codes, and dequantises its part."""

    def __init__(self, layer: str, opened: Mapping[str, Any], settings: Settings, dtype: torch.dtype) -> None:
        """Find the tensors of ``layer`` in ``opened``, the file of each by the ends of their names.

        Raises UnsupportedModel for tensors that are not understood, here and at each read.
        """
        self._layer, self._opened, self._settings, self._dtype = layer, opened, settings, dtype
        self._method = method_of(settings).lower()
        sizes = {
            end: self._tensor(end).tolist()
            if end == "weight_shape"
            else file.get_slice(name_of(self._method, layer, end)).get_shape()
            for end, file in opened.items()
        }
        with self._refusing():
            self.shape = weight_shape(self._method, sizes)

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Return the parts in the dtype, one after the other. Outputs are dequantised alone, inputs in whole rows."""
        meaning = self._meaning()
        if isinstance(meaning, Codes):
            if dim == -2:
                return meaning.rows(parts).dequantised(self._dtype)
            meaning = meaning.dequantised(self._dtype)
        return torch.cat([meaning.narrow(dim, part.start, len(part)) for part in parts], dim).to(self._dtype)

    def whole(self) -> torch.Tensor:
        """Return the whole weight in the dtype."""
        return dequantised(self._meaning(), self._dtype)

    def _meaning(self) -> Meaning:
        with self._refusing():
            return read_layer(self._method, self._settings, {end: self._tensor(end) for end in self._opened})

    def _tensor(self, end: str) -> torch.Tensor:
        found: torch.Tensor = self._opened[end].get_tensor(name_of(self._method, self._layer, end))
        return found

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._layer}: {error.message}") from error


class StoredExperts:
    """One tensor of all experts, which the checkpoint stores expert by expert, and maybe in sections of rows."""

    def __init__(self, sections: Sequence[Sequence[Stored]]) -> None:
        """``sections`` each have ``[rows, columns]`` of every expert. Raises UnsupportedModel if shapes differ."""
        first = sections[0][0].shape
        experts = len(sections[0])
        if len(first) != 2 or any(len(section) != experts for section in sections):
            raise UnsupportedModel(f"the checkpoint has experts of {len(first)} dimensions or not all of their weights")
        if any(expert.shape != first for section in sections for expert in section):
            raise UnsupportedModel("the checkpoint has experts of different shapes")
        self._sections, self._rows = sections, first[0]
        self.shape = (experts, len(sections) * first[0], first[1])

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Read the parts of every expert, and stack them. Raises UnsupportedModel for rows that cross two sections."""
        if dim == -1:
            return torch.stack([self._expert(expert, dim, parts) for expert in range(self.shape[0])])
        pieces = [(part.start // self._rows, part) for part in parts]
        if any(part.stop > (section + 1) * self._rows for section, part in pieces):
            raise UnsupportedModel("experts do not divide among ranks")
        own = [
            (self._sections[section], range(part.start - section * self._rows, part.stop - section * self._rows))
            for section, part in pieces
        ]
        return torch.stack(
            [torch.cat([section[expert].read(dim, [rows]) for section, rows in own]) for expert in range(self.shape[0])]
        )

    def whole(self) -> torch.Tensor:
        """Read all experts, [experts, rows, columns]."""
        return self.read(-1, [range(self.shape[-1])])

    def _expert(self, number: int, dim: int, parts: Sequence[range]) -> torch.Tensor:
        return torch.cat([section[number].read(dim, parts) for section in self._sections])


class TransposedExperts:
    """One tensor [experts, rows, columns], which the checkpoint stores as [experts, columns, rows]."""

    def __init__(self, stored: Stored) -> None:
        """Read from ``stored``."""
        experts, columns, rows = stored.shape
        self._stored, self.shape = stored, (experts, rows, columns)

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Read these ``parts`` of dimension ``dim`` (-1 or -2) one after the other, all of the others."""
        return self._stored.read(-3 - dim, parts).transpose(1, 2)

    def whole(self) -> torch.Tensor:
        """Read all experts, [experts, rows, columns]."""
        return self._stored.whole().transpose(1, 2)


class JoinedTensors:
    """One tensor that the checkpoint stores in several pieces: ranks have it whole, or not at all."""

    def __init__(self, pieces: Sequence[Stored], dim: int) -> None:
        """``pieces`` follow one another in dimension ``dim``."""
        self._pieces, self._dim = pieces, dim
        sizes = list(pieces[0].shape)
        sizes[dim] = sum(piece.shape[dim] for piece in pieces)
        self.shape = tuple(sizes)

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Raise UnsupportedModel: such a tensor is not read in part."""
        raise UnsupportedModel("the checkpoint has weights in pieces, which ranks cannot read in part")

    def whole(self) -> torch.Tensor:
        """Read all pieces, and join them."""
        return torch.cat([piece.whole() for piece in self._pieces], self._dim)


class StoredWeights:
    """The tensors of a checkpoint for one model."""

    def __init__(self, model_dir: Path, model: Any, files: ExitStack, dtype: torch.dtype) -> None:
        """Open the checkpoint; ``files`` closes its files. Quantised weights are read in ``dtype``.

        Raises UnsupportedModel for one that is not in safetensors, and for one whose tensors become the model's by more
        than renaming and merging.
        """
        raw = load_config(model_dir)
        mapping = get_model_conversion_mapping(model, tensor_names(raw))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._model, names = model, model.state_dict()
        self._of: dict[str, Stored] = {}
        merged: dict[str, dict[str, list[Stored]]] = {}
        settings = settings_of(raw)
        tensors = _tensors(model_dir, files)
        plain = ((name, StoredTensor(opened, name)) for name, opened in tensors)
        found = plain if settings is None else _dequantised(tensors, settings, dtype)
        for name, stored in sorted(found, key=lambda each: dot_natural_key(each[0])):
            target, pattern = rename_source_key(name, renamings, self._converters, model.base_model_prefix, names)
            if pattern is None:
                self._of[target] = stored
            elif target in names:
                merged.setdefault(target, {}).setdefault(pattern, []).append(stored)
        for target, sections in merged.items():
            self._of[target] = self._merge(target, sections)

    def get(self, name: str) -> Stored | None:
        """Return the tensor that the model calls ``name``; None where the checkpoint lacks it."""
        return self._of.get(name)

    def _turned(self, target: str, stored: Stored) -> Stored:
        """Return experts as the model has them. Checkpoints have rows or columns first; the library goes by shapes."""
        mine = tuple(self._model.get_parameter(target).shape)
        ways = (stored, TransposedExperts(stored)) if len(stored.shape) == len(mine) == 3 else ()
        fitting = [way for way in ways if _has_part(way.shape, mine)]
        if len(fitting) != 1:
            raise UnsupportedModel(
                f"{target} has shape {stored.shape}, which does not tell its rows, {mine[1:]} in each rank, from its "
                "columns"
            )
        return fitting[0]

    def _merge(self, target: str, sections: dict[str, list[Stored]]) -> Stored:
        converter = next(entry for entry in self._converters if set(sections) <= set(entry.source_patterns))
        kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        patterns = converter.source_patterns
        if len(sections) < len(patterns):
            raise UnsupportedModel(f"the checkpoint lacks weights: {', '.join(sorted(set(patterns) - set(sections)))}")
        if [kind for kind, _ in kinds] == [Concatenate] and all(len(section) == 1 for section in sections.values()):
            return JoinedTensors([sections[pattern][0] for pattern in patterns], kinds[0][1] or 0)
        if [kind for kind, _ in kinds] == [Transpose] and all(len(section) == 1 for section in sections.values()):
            return self._turned(target, sections[patterns[0]][0])
        is_merged = kinds == [(MergeModulelist, 0)] and len(patterns) == 1
        is_joined = kinds == [(MergeModulelist, 0), (Concatenate, 1)]
        if not is_merged and not is_joined:
            steps = ", ".join(type(step).__name__ for step in converter.operations)
            raise UnsupportedModel(
                f"{type(self._model).__name__} has weights that ranks cannot read in part: they are made by {steps}"
            )
        return StoredExperts([sections[pattern] for pattern in patterns])


def _has_part(whole: tuple[int, ...], mine: tuple[int, ...]) -> bool:
    """Return whether ``mine`` is ``whole`` with at most one dimension divided."""
    return (
        all(size % own == 0 for size, own in zip(whole, mine, strict=True))
        and sum(size != own for size, own in zip(whole, mine, strict=True)) <= 1
    )


def _dequantised(
    tensors: Iterable[tuple[str, Any]], settings: Settings, dtype: torch.dtype
) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a checkpoint with these settings by the names that it would have for them unquantised."""
    method, layers = method_of(settings).lower(), defaultdict[str, dict[str, Any]](dict)
    for name, opened in tensors:
        layer, end = layer_of(method, name)
        layers[layer][end] = opened
    quantised = 0
    for layer, ends in layers.items():
        if is_quantised(method, set(ends)):
            quantised += 1
            weight = {end: opened for end, opened in ends.items() if end != "bias"}
            yield weight_name(method, layer), QuantisedTensor(layer, weight, settings, dtype)
            ends = {end: opened for end, opened in ends.items() if end == "bias"}
        for end, opened in ends.items():
            name = name_of(method, layer, end)
            check_plain(method, layer, end, opened.get_slice(name).get_dtype())
            yield name, StoredTensor(opened, name)
    if not quantised:
        raise none_quantised("the checkpoint", method)
    _log.info("weights_are_quantised", method=method, layers=quantised, dequantised_to=str(dtype))


def _tensors(model_dir: Path, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and its opened file."""
    for path in weight_files(model_dir):
        if path.suffix != ".safetensors":
            raise UnsupportedModel(f"{path.name}: ranks read their shares from safetensors only")
        try:
            opened = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
        yield from ((name, opened) for name in opened.keys())  # noqa: SIM118 - it is no mapping.
