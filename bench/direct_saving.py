"""Direct saving, the baseline of HCache's figure 14: every layer's row of every token goes to its place at once.

Each row is a small write of its own, made while the step waits. Two-stage saving exists because of what this costs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.saving_step import SavedRows
from shared.errors import ConfigError

_BLOCK_BYTES = 4096


class DirectSaver:
    """One file per sequence, ``[layers, max_tokens, stride]``. A ``HiddenSink`` for one step after another."""

    def __init__(self, shape: HiddenShape, directory: Path, *, max_tokens: int, past_page_cache: bool) -> None:
        """``past_page_cache`` writes with O_DIRECT, in whole blocks. Raises ConfigError where that is impossible."""
        self._shape, self._directory, self._max_tokens = shape, directory, max_tokens
        self._flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if past_page_cache else 0)
        self.stride = -(-shape.row_bytes // _BLOCK_BYTES) * _BLOCK_BYTES if past_page_cache else shape.row_bytes
        self._block = mmap.mmap(-1, self.stride)  # Aligned, as O_DIRECT wants it.
        self._files: dict[str, int] = {}
        self._rows: Sequence[SavedRows] = ()

    def set_rows(self, rows: Sequence[SavedRows]) -> None:
        """What the next step's rows are."""
        self._rows = rows

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        content = hidden.detach().cpu().contiguous().view(torch.uint8).numpy()
        block = np.frombuffer(self._block, dtype=np.uint8)
        for each in self._rows:
            file = self._file(each.sequence_id)
            for number in range(each.rows):
                block[: self._shape.row_bytes] = content[each.first_row + number]
                place = layer * self._max_tokens + each.position + number
                os.pwrite(file, self._block, place * self.stride)

    def read(self, sequence_id: str, layer: int, first: int, end: int) -> torch.Tensor:
        """What was written of tokens ``[first, end)``, [end - first, hidden]."""
        with (self._directory / sequence_id).open("rb") as file:
            file.seek((layer * self._max_tokens + first) * self.stride)
            rows = np.frombuffer(file.read((end - first) * self.stride), dtype=np.uint8).reshape(-1, self.stride)
        return torch.from_numpy(rows[:, : self._shape.row_bytes].copy()).view(self._shape.torch_dtype)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, sequence_id: str) -> int:
        if sequence_id not in self._files:
            try:
                file = os.open(self._directory / sequence_id, self._flags, 0o600)
                os.ftruncate(file, self._shape.layers * self._max_tokens * self.stride)
            except OSError as error:
                raise ConfigError(f"cannot write hidden states to {self._directory}: {error.strerror}") from error
            self._files[sequence_id] = file
        return self._files[sequence_id]
