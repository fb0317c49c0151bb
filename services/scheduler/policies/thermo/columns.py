"""Columns of numbers: the default policy's state takes a few bytes a number, in memory as in a snapshot.

An array is read and written by index as fast as an attribute. In a snapshot it is its type code and its bytes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    _Wholes = array[int]
    _Reals = array[float]
else:
    _Wholes = _Reals = array  # Arrays can be subscripted from Python 3.12 on.


ROWS = 64
"""Rows by which tables grow."""


class Wholes(_Wholes):
    """A column of whole numbers."""


class Reals(_Reals):
    """A column of floating-point numbers."""


def wholes(typecode: str) -> Any:
    """Return a struct's field for a column of whole numbers of this type code; row 0 stands for no row."""
    return msgspec.field(default_factory=lambda: Wholes(typecode, [0]))


def reals(typecode: str) -> Any:
    """Return a struct's field for a column of floating-point numbers of this type code; row 0 stands for no row."""
    return msgspec.field(default_factory=lambda: Reals(typecode, [0.0]))


def grow(columns: tuple[_Wholes | _Reals, ...], rows: int) -> None:
    """Add ``rows`` rows of zeros to each column."""
    for column in columns:
        column.frombytes(bytes(column.itemsize * rows))


def column(numbers: _Wholes | _Reals) -> NDArray[Any]:
    """Return a view of a column as an array. The column cannot grow while the view is there: keep it for a moment."""
    return np.frombuffer(numbers, dtype=numbers.typecode)


def encoded(told: object) -> bytes:
    """Return a column as bytes, for msgspec. Raises NotImplementedError for anything else."""
    if isinstance(told, array):
        return told.typecode.encode() + told.tobytes()
    raise NotImplementedError(f"{type(told).__name__} is no column")


def decoded(kind: type, data: Any) -> object:
    """Undo :func:`encoded`. Raises ValueError for bytes that it did not make."""
    if not isinstance(data, bytes) or not data or data[:1] not in b"BHIQiqfd":
        raise ValueError("not a column")
    made: array[Any] = kind(chr(data[0]))
    made.frombytes(memoryview(data)[1:])
    return made
