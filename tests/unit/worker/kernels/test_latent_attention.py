"""Attention to latents and their write against oracles in double precision, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import PagedTensors
from services.worker.engine.key_splits import MAX_SPLITS, SPLIT_KEYS
from services.worker.kernels.latent_attention import check_latents
from shared.errors import InvariantViolated
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.interpreted import Interpreter, as_arrays, as_tensors
from tests.unit.worker.kernels.paged_batches import TABLES, Shape, make_batch
from tests.unit.worker.kernels.test_paged_attention import BATCHES, BOUNDED, TOLERANCE

PADDING = 5
"""Values of a plane behind those of a row."""


@dataclass(frozen=True)
class Case:
    """A step over latents that lie in planes wider than they are."""

    q: torch.Tensor
    pool: torch.Tensor
    paged: PagedTensors
    rank: int


def make_case(
    segments: tuple[tuple[int, int], ...],
    *,
    heads: int = 4,
    rank: int = 24,
    rope: int = 8,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Slots that no token fills, and what lies in a plane behind a row, are NaN."""
    width = rank + rope
    batch = make_batch(Shape(segments, heads, 1, width, page_size, dtype))
    plane = torch.full((*batch.k_pool.shape[:2], width + PADDING), float("nan"), dtype=dtype)
    plane[..., :width] = batch.k_pool[:, :, 0]
    pool = plane.as_strided((len(plane), page_size, 1, width), (plane.stride(0), plane.stride(1), width, 1))
    return Case(batch.q, pool, batch.paged, rank)


def attend(interpreter: Interpreter, case: Case, **settings: Any) -> torch.Tensor:
    """What the kernels give."""
    tables = {name: getattr(case.paged, name) for name in TABLES}
    plane = case.pool.as_strided((*case.pool.shape[:2], case.pool.stride(1)), (*case.pool.stride()[:2], 1))
    found: np.ndarray = interpreter.call(
        _attend, case.q.numpy(), plane.numpy(), as_arrays(tables), case.rank, as_arrays(settings)
    )
    return torch.from_numpy(found)


def _attend(
    q: np.ndarray, plane: np.ndarray, arrays: dict[str, Any], rank: int, settings: dict[str, Any]
) -> np.ndarray:
    from services.worker.kernels import latent_attention

    query, rows = torch.from_numpy(q), torch.from_numpy(plane)
    width = query.shape[2]
    pool = rows.as_strided((*rows.shape[:2], 1, width), (rows.stride(0), rows.stride(1), width, 1))
    found: np.ndarray = latent_attention(
        query, pool, PagedTensors(**as_tensors(arrays)), rank=rank, **as_tensors(settings)
    ).numpy()
    return found


def assert_equal_to_oracle(interpreter: Interpreter, case: Case, **change: Any) -> None:
    """In every value, within what the data type rounds."""
    settings = {"scaling": 0.2, "window": None, "softcap": None, "chunk": None, "sinks": None} | change

    found = attend(interpreter, case, **settings)

    expected = oracles.latent_attention(case.q, case.pool, case.paged, rank=case.rank, **settings)
    assert found.dtype == case.q.dtype
    assert found.isfinite().all()
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_every_mixture_of_rows_and_page_sizes(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], page_size: int
) -> None:
    """Decode rows, whole prompts and later chunks in one batch equal the oracle, and nothing else is read."""
    assert_equal_to_oracle(interpreter, make_case(segments, page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (96, 96), (5, 1)])
def test_every_size_of_latents(interpreter: Interpreter, rank: int, rope: int, dtype: torch.dtype) -> None:
    """Powers of two or not, with a rope as wide as the rank, in fp32 and fp16."""
    assert_equal_to_oracle(interpreter, make_case(((1, 37), (9, 9)), rank=rank, rope=rope, dtype=dtype))


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_every_number_of_heads(interpreter: Interpreter, heads: int) -> None:
    """Less than a tile has rows, as many, more, and those that are no power of two."""
    assert_equal_to_oracle(interpreter, make_case(((1, 20), (7, 11)), heads=heads))


@pytest.mark.parametrize(
    "bound",
    [{"window": 9}, {"window": 10_000}, {"chunk": 20}, {"softcap": 0.7, "window": 9}],
    ids=str,
)
@pytest.mark.parametrize("segments", BOUNDED.values(), ids=BOUNDED)
def test_bounds_caps_and_sinks(
    interpreter: Interpreter, segments: tuple[tuple[int, int], ...], bound: dict[str, Any]
) -> None:
    """Whatever bounds a row's keys, with sinks and without."""
    assert_equal_to_oracle(interpreter, make_case(segments), **bound)
    assert_equal_to_oracle(interpreter, make_case(segments), sinks=torch.tensor([-30.0, 0.0, 4.0, 90.0]), **bound)


@pytest.mark.parametrize("context", [SPLIT_KEYS - 1, SPLIT_KEYS, 3 * SPLIT_KEYS + 100])
def test_long_contexts_are_split_and_joined(interpreter: Interpreter, context: int) -> None:
    """Around the edges of a split, and over several, with sinks and windows, the joined result equals the oracle."""
    case = make_case(((1, context), (1, 5)), heads=2)
    assert_equal_to_oracle(interpreter, case)
    assert_equal_to_oracle(interpreter, case, window=SPLIT_KEYS + 20, sinks=torch.tensor([0.5, 3.0]))


def test_beyond_the_most_splits_they_grow(interpreter: Interpreter) -> None:
    """A context longer than MAX_SPLITS splits of the usual size is still seen whole."""
    assert_equal_to_oracle(interpreter, make_case(((1, MAX_SPLITS * SPLIT_KEYS + 77),), heads=1))


def _alone(case: Case, segment: int) -> Case:
    """One segment of a case, by itself."""
    first, last = case.paged.cu_rows[segment : segment + 2].tolist()
    context = case.paged.context[segment : segment + 1]
    paged = PagedTensors(
        cu_rows=torch.tensor([0, last - first], dtype=torch.int32),
        context=context,
        page_table=case.paged.page_table[segment : segment + 1],
        max_rows=last - first,
        max_length=int(context) + last - first,
    )
    return replace(case, q=case.q[first:last], paged=paged)


@pytest.mark.parametrize("heads", [2, 40])
def test_a_row_does_not_depend_on_its_neighbours(interpreter: Interpreter, heads: int) -> None:
    """Its bits are the same alone and beside longer rows and prompts, of decode rows and of chunks."""
    together = make_case(((1, 700), (1, 1600), (9, 4), (30, 0)), heads=heads)

    found = attend(interpreter, together, scaling=0.2)

    for segment in (0, 2):
        rows = slice(*together.paged.cu_rows[segment : segment + 2].tolist())
        assert torch.equal(found[rows], attend(interpreter, _alone(together, segment), scaling=0.2))


@pytest.mark.parametrize("heads", [3, 40])
def test_a_row_of_a_chunk_does_not_depend_on_where_the_chunk_begins(interpreter: Interpreter, heads: int) -> None:
    """Rows of a prompt have the same bits as rows of its second part."""
    whole = make_case(((60, 0),), heads=heads)
    paged = replace(whole.paged, cu_rows=torch.tensor([0, 23], dtype=torch.int32), max_rows=23)
    part = replace(whole, q=whole.q[37:], paged=replace(paged, context=torch.tensor([37], dtype=torch.int32)))

    found = attend(interpreter, whole, scaling=0.2)

    assert torch.equal(found[37:], attend(interpreter, part, scaling=0.2))


def test_what_does_not_belong_together_is_refused() -> None:
    """Queries of another width, latents beyond what is compiled for, two bounds, sinks of other heads."""
    case = make_case(((1, 5),))

    changes: dict[str, dict[str, Any]] = {
        "cannot attend to latents": {"pool": case.pool[..., :-1]},
        r"latents of 32 \+ 0 are beyond": {"rank": 32},
        "in a window of 3 and in chunks of 4": {"window": 3, "chunk": 4},
        "in chunks of 0": {"chunk": 0},
        "not one for each of 4 heads": {"sinks": torch.zeros(3)},
        "adjacent in memory": {"q": case.q[..., ::2], "pool": case.pool[..., ::2], "rank": 12},
    }
    for match, change in changes.items():
        given: dict[str, Any] = {"pool": case.pool, "rank": case.rank, "window": None, "chunk": None, "sinks": None}
        with pytest.raises(InvariantViolated, match=match):
            check_latents(**{"q": case.q, **given, **change})


def _write(rows: np.ndarray, plane: np.ndarray, slots: np.ndarray, width: int) -> np.ndarray:
    from services.worker.kernels import latent_write

    kept = torch.from_numpy(plane)
    pool = kept.as_strided((*kept.shape[:2], 1, width), (kept.stride(0), kept.stride(1), width, 1))
    latent_write(torch.from_numpy(rows), pool, torch.from_numpy(slots))
    return kept.numpy()


@pytest.mark.parametrize("width", [32, 40])
def test_rows_reach_their_slots(interpreter: Interpreter, width: int) -> None:
    """To the bit, padding nowhere, and nothing beside a row is touched."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 1, width, generator=random)
    plane = torch.randn(5, 4, width + PADDING, generator=random)
    slots = torch.tensor([7, 0, -1, 19, 3, 12])
    expected = plane.clone()
    oracles.latent_write(rows[:, 0], expected[..., :width], slots)

    found = interpreter.call(_write, rows.numpy(), plane.numpy(), slots.numpy(), width)

    assert torch.equal(torch.from_numpy(found), expected)
    with pytest.raises(InvariantViolated, match="cannot be written"):
        interpreter.call(_write, rows.numpy(), plane.numpy(), slots.numpy(), width - 1)
