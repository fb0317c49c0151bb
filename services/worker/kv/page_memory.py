"""Location and layout of pages in memory, for movers that read and write them.

A row is K (or V) of one page in one layer, ``half_bytes`` contiguous bytes. Both layouts that pools have are three
strides; code that moves rows needs nothing else (Strata section 4.2.1: one more multiplication per row).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.messages.pools import KvGeometry

PageNumbers = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Strides of pages in bytes.

    Row (page, layer, half) begins at ``page * page_stride + layer * layer_stride + half * half_stride`` bytes; half 0
    is K, 1 is V.
    """

    pages: int
    layers: int
    half_bytes: int
    page_stride: int
    layer_stride: int
    half_stride: int

    @classmethod
    def page_first(cls, geometry: KvGeometry, pages: int) -> PageLayout:
        """Return the layout ``[pages, layers, 2, half_bytes]`` of host pools."""
        half = geometry.half_bytes
        return cls(pages, geometry.layers, half, geometry.page_bytes, 2 * half, half)

    @classmethod
    def layer_first(cls, geometry: KvGeometry, pages: int) -> PageLayout:
        """Return the layout ``[layers, 2, pages, half_bytes]`` of device pools."""
        half = geometry.half_bytes
        return cls(pages, geometry.layers, half, half, 2 * pages * half, pages * half)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.layers * 2 * self.half_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PageMemory:
    """Pages in host memory (``array``, flat uint8) or on a GPU (``tensor``, flat uint8); the other is None.

    ``is_pinned``: the array is registered with the driver, so a GPU may read and write it by itself.
    """

    layout: PageLayout
    array: Rows | None = None
    tensor: torch.Tensor | None = None
    is_pinned: bool = False

    def host_rows(self) -> Rows:
        """Return pages in host memory as uint8 ``[pages, layers, 2, half_bytes]``, a view in either layout."""
        assert self.array is not None
        layout = self.layout
        strides = (layout.page_stride, layout.layer_stride, layout.half_stride, 1)
        shape = (layout.pages, layout.layers, 2, layout.half_bytes)
        return np.lib.stride_tricks.as_strided(self.array, shape, strides, writeable=self.array.flags.writeable)

    def device_bytes(self) -> torch.Tensor:
        """Return pages on a GPU as uint8 ``[pages, layers, 2, half_bytes]``, a view in either layout."""
        assert self.tensor is not None
        layout = self.layout
        strides = (layout.page_stride, layout.layer_stride, layout.half_stride, 1)
        return self.tensor.as_strided((layout.pages, layout.layers, 2, layout.half_bytes), strides)

    def device_rows(self) -> torch.Tensor:
        """Return pages on a GPU as ``[pages, layers, 2, elements]`` of the widest integers that a row divides into."""
        assert self.tensor is not None
        layout = self.layout
        kind = word_type(layout.half_bytes, (torch.int64, torch.int32, torch.int16, torch.uint8))
        size = kind.itemsize
        strides = (layout.page_stride // size, layout.layer_stride // size, layout.half_stride // size, 1)
        shape = (layout.pages, layout.layers, 2, layout.half_bytes // size)
        return self.tensor.view(kind).as_strided(shape, strides)


def word_type(half_bytes: int, kinds: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the first of ``kinds`` whose size divides a row."""
    return next(kind for kind in kinds if half_bytes % kind.itemsize == 0)
