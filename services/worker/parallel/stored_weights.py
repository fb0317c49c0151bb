"""The tensors of a checkpoint by the names that the model has for them; a rank reads its part alone.

Hugging Face's conversions say how a checkpoint's names and tensors become the model's. Renamed tensors are served, and
weights of experts that the checkpoint has one by one: the model has them as one tensor ``[experts, rows, columns]``,
where the rows of two (gate and up) follow one another. Other conversions compute with whole tensors: models that
need them are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from services.worker.engine.text_parts import tensor_names
from shared.errors import UnsupportedModel
from shared.model_files import load_config, weight_files


class Stored(Protocol):
    """One tensor of the model, as the checkpoint has it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        """Read these ``parts`` of dimension ``dim`` (-1 or -2) one after the other, all of the others."""

    def whole(self) -> torch.Tensor:
        """All of it."""


class StoredTensor:
    """A tensor that the checkpoint has as the model has it."""

    def __init__(self, opened: Any, name: str) -> None:
        self._slice = opened.get_slice(name)
        self.shape = tuple(int(size) for size in self._slice.get_shape())

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        before = (slice(None),) * (len(self.shape) + dim)
        pieces = [self._slice[(*before, slice(part.start, part.stop))] for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[:] if self.shape else self._slice[...]
        return tensor


class StoredExperts:
    """One tensor of all experts, which the checkpoint has expert by expert, and maybe in sections of rows."""

    def __init__(self, sections: Sequence[Sequence[StoredTensor]]) -> None:
        """``sections`` each have ``[rows, columns]`` of every expert. Raises UnsupportedModel where they differ."""
        first = sections[0][0].shape
        experts = len(sections[0])
        if len(first) != 2 or any(len(section) != experts for section in sections):
            raise UnsupportedModel(f"the checkpoint has experts of {len(first)} dimensions or not all of their weights")
        if any(expert.shape != first for section in sections for expert in section):
            raise UnsupportedModel("the checkpoint has experts of different shapes")
        self._sections, self._rows = sections, first[0]
        self.shape = (experts, len(sections) * first[0], first[1])

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
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
        return self.read(-1, [range(self.shape[-1])])

    def _expert(self, number: int, dim: int, parts: Sequence[range]) -> torch.Tensor:
        return torch.cat([section[number].read(dim, parts) for section in self._sections])


class JoinedTensors:
    """One tensor that the checkpoint has in several, one after the other: ranks have it whole, or not at all."""

    def __init__(self, pieces: Sequence[StoredTensor], dim: int) -> None:
        """``pieces`` follow one another in dimension ``dim``."""
        self._pieces, self._dim = pieces, dim
        sizes = list(pieces[0].shape)
        sizes[dim] = sum(piece.shape[dim] for piece in pieces)
        self.shape = tuple(sizes)

    def read(self, dim: int, parts: Sequence[range]) -> torch.Tensor:
        raise UnsupportedModel("the checkpoint has weights in pieces, which ranks cannot read in part")

    def whole(self) -> torch.Tensor:
        return torch.cat([piece.whole() for piece in self._pieces], self._dim)


class StoredWeights:
    """What the files of a checkpoint hold for a model."""

    def __init__(self, model_dir: Path, model: Any, files: ExitStack) -> None:
        """``files`` closes them. Raises UnsupportedModel for a checkpoint that is not in safetensors, and for one whose
        tensors become the model's by more than renaming and merging.
        """
        mapping = get_model_conversion_mapping(model, tensor_names(load_config(model_dir)))
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._model, names = model, model.state_dict()
        self._of: dict[str, Stored] = {}
        merged: dict[str, dict[str, list[StoredTensor]]] = {}
        for name, opened in sorted(_tensors(model_dir, files), key=lambda found: dot_natural_key(found[0])):
            target, pattern = rename_source_key(name, renamings, self._converters, model.base_model_prefix, names)
            if pattern is None:
                self._of[target] = StoredTensor(opened, name)
            elif target in names:
                merged.setdefault(target, {}).setdefault(pattern, []).append(StoredTensor(opened, name))
        for target, sections in merged.items():
            self._of[target] = self._merge(sections)

    def get(self, name: str) -> Stored | None:
        """Return the tensor that the model calls ``name``; None where the checkpoint lacks it."""
        return self._of.get(name)

    def _merge(self, sections: dict[str, list[StoredTensor]]) -> StoredExperts | JoinedTensors:
        converter = next(entry for entry in self._converters if set(sections) <= set(entry.source_patterns))
        kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        patterns = converter.source_patterns
        if len(sections) < len(patterns):
            raise UnsupportedModel(f"the checkpoint lacks weights: {', '.join(sorted(set(patterns) - set(sections)))}")
        if [kind for kind, _ in kinds] == [Concatenate] and all(len(section) == 1 for section in sections.values()):
            return JoinedTensors([sections[pattern][0] for pattern in patterns], kinds[0][1] or 0)
        is_merged = kinds == [(MergeModulelist, 0)] and len(patterns) == 1
        is_joined = kinds == [(MergeModulelist, 0), (Concatenate, 1)]
        if not is_merged and not is_joined:
            steps = ", ".join(type(step).__name__ for step in converter.operations)
            raise UnsupportedModel(
                f"{type(self._model).__name__} has weights that ranks cannot read in part: they are made by {steps}"
            )
        return StoredExperts([sections[pattern] for pattern in patterns])


def _tensors(model_dir: Path, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Names and the opened file of each."""
    for path in weight_files(model_dir):
        if path.suffix != ".safetensors":
            raise UnsupportedModel(f"{path.name}: ranks read their shares from safetensors only")
        try:
            opened = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error
        yield from ((name, opened) for name in opened.keys())  # noqa: SIM118 - it is no mapping.
