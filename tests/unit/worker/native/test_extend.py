"""The compiled prefill kernel, wherever there is a C compiler, against plain softmax attention."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.native_work import find_extend_work, find_selected_work
from services.worker.native import extend
from services.worker.native.extend import SPAN_KEYS, NativeExtend, compile_extend
from tests.unit.worker.torch_threads import torch_threads

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names vector extensions of x86")


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    """What a test has compiled, perhaps with other flags, is its own."""
    compile_extend.cache_clear()
    yield
    compile_extend.cache_clear()


def compiled(head_dim: int, group: int, dtype: torch.dtype = torch.float32) -> NativeExtend:
    kernel = compile_extend(head_dim, group, dtype)
    assert kernel is not None
    return kernel


class Step:
    """Segments of ``(rows, context)`` over shuffled pages of random KV with two KV heads, and a query for each row."""

    def __init__(
        self, shapes: list[tuple[int, int]], *, heads: int, head_dim: int, page_size: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        counts = [-(-sum(shape) // page_size) for shape in shapes]
        tables = np.split(np.random.default_rng(0).permutation(sum(counts)).astype(np.int32), np.cumsum(counts)[:-1])
        self.segments = [Segment(rows, context, table) for (rows, context), table in zip(shapes, tables, strict=True)]
        self.group, self.head_dim, self.page_size = heads // 2, head_dim, page_size
        self.pool = (torch.randn(2, sum(counts), page_size, 2, head_dim, generator=generator) * 2).to(dtype)
        rows = sum(rows for rows, _ in shapes)
        self.query = torch.randn(rows, heads, head_dim, generator=generator).to(dtype)

    def attend(self, kernel: NativeExtend, window: int | None) -> torch.Tensor:
        """What the kernel writes into an output of sevens, [T, heads, head_dim]."""
        meta = ForwardMeta.build(self.segments, self.page_size, "cpu")
        work = find_extend_work(meta, window, self.group, 2)
        assert work is not None
        output = torch.full_like(self.query, -7.0)
        kernel.attend(work, self.query.transpose(0, 1), self.pool[0], self.pool[1], output, self.head_dim**-0.5)
        return output

    def expected(self, window: int | None) -> torch.Tensor:
        """Causal attention written out, in double precision; sevens for segments of one row."""
        outputs, row = [], 0
        for segment in self.segments:
            query = self.query[row : row + segment.rows].double()
            row += segment.rows
            if segment.rows == 1:
                outputs.append(torch.full_like(query, -7.0))
                continue
            key, value = (
                half[torch.from_numpy(segment.pages).long()].flatten(0, 1)[: segment.length].double()
                for half in self.pool
            )
            keys, values = (half.repeat_interleave(self.group, dim=1) for half in (key, value))
            scores = torch.einsum("thd,khd->htk", query, keys) * self.head_dim**-0.5
            at, place = torch.arange(segment.context, segment.length)[:, None], torch.arange(segment.length)
            seen = (place <= at) & (place > at - (window or 10**6))
            outputs.append(torch.einsum("htk,khd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
        return torch.cat(outputs)


SHAPES = [(2, 0), (63, 1), (1, 40), (64, 0), (30, 200), (130, 61), (5, 127)]


@needs_compiler
@pytest.mark.parametrize("window", [None, 1, 24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "head_dim", "heads"), [(1, 32, 2), (16, 64, 6), (16, 20, 8), (64, 80, 2)])
def test_extend_equals_softmax_attention(
    page_size: int, head_dim: int, heads: int, dtype: torch.dtype, window: int | None
) -> None:
    """Any chunk, context, window, group and page size, beside single rows that it must leave alone."""
    step = Step(SHAPES, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype)

    found = step.attend(compiled(head_dim, step.group, dtype), window)

    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), step.expected(window), atol=tolerance, rtol=tolerance)


@needs_compiler
@needs_x86
@pytest.mark.parametrize("lacking", [["-mno-avx512bf16"], ["-mno-avx512f"], ["-mno-avx"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_lesser_processors_get_the_same_answers(
    head_dim: int, dtype: torch.dtype, lacking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bfloat16 products, and with narrower vectors."""
    monkeypatch.setattr(extend, "_FLAGS", [*extend._FLAGS, *lacking])
    step = Step(SHAPES, heads=6, head_dim=head_dim, page_size=16, dtype=dtype)

    found = step.attend(compiled(head_dim, 3, dtype), 100)

    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), step.expected(100), atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_notice_its_chunk(dtype: torch.dtype, window: int | None) -> None:
    """A prompt in chunks of any size, beside other segments, gets the bits of the whole prompt alone."""
    whole = Step([(200, 90)], heads=6, head_dim=64, page_size=16, dtype=dtype)
    kernel = compiled(64, 3, dtype)
    (segment,) = whole.segments
    expected = whole.attend(kernel, window)

    for sizes in ([2, 198], [64, 64, 72], [37, 100, 63]):
        start, found = 0, []
        for size in sizes:
            part = Step([(5, 10), (size, 0)], heads=6, head_dim=64, page_size=16, dtype=dtype)
            part.segments[1] = Segment(size, 90 + start, segment.pages)
            # The other segment's own page lies behind those of the prompt.
            part.segments[0] = Segment(5, 10, np.array([whole.pool.shape[1]], dtype=np.int32))
            part.pool = torch.cat([whole.pool, part.pool[:, :1]], dim=1)
            part.query[5:] = whole.query[start : start + size]
            found.append(part.attend(kernel, window)[5:])
            start += size

        assert torch.equal(torch.cat(found), expected)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    """Two threads, and the smaller tiles that go with them, give the bits of one."""
    step = Step(SHAPES, heads=6, head_dim=64, page_size=16, dtype=dtype)
    kernel = compiled(64, 3, dtype)
    outputs = []
    for threads in (1, 2, 7):
        with torch_threads(threads):
            outputs.append(step.attend(kernel, None))

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@needs_compiler
@pytest.mark.parametrize("window", [None, 5_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_keys_are_summed_by_any_thread(dtype: torch.dtype, window: int | None) -> None:
    """Keys of several spans give softmax attention, in the same bits by tiles that see all of them and by units of one
    span each.
    """
    step = Step([(8, 2 * SPAN_KEYS + 100), (6, SPAN_KEYS - 3)], heads=6, head_dim=20, page_size=16, dtype=dtype)
    kernel = compiled(20, 3, dtype)
    outputs, parts = [], []
    for threads in (1, 2, 7):
        with torch_threads(threads):
            work = find_extend_work(ForwardMeta.build(step.segments, 16, "cpu"), window, 3, 2)
            assert work is not None
            parts.append(work.tiling.parts)
            outputs.append(step.attend(kernel, window))

    assert parts[0] == 0 < parts[2]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(outputs[2].double(), step.expected(window), atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_notice_where_spans_are_cut(dtype: torch.dtype) -> None:
    """Rows on both sides of a span's edge get the same bits in one chunk and in several."""
    whole = Step([(40, SPAN_KEYS - 20)], heads=6, head_dim=20, page_size=16, dtype=dtype)
    kernel = compiled(20, 3, dtype)
    (segment,) = whole.segments
    query, expected = whole.query, whole.attend(kernel, None)

    for start, end in ((0, 20), (17, 23), (20, 40), (38, 40)):
        whole.segments = [Segment(end - start, segment.context + start, segment.pages)]
        whole.query = query[start:end]

        assert torch.equal(whole.attend(kernel, None), expected[start:end])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_keys_chosen_are_the_whole_prefix(dtype: torch.dtype) -> None:
    """Keys that lie one after the other give the bits of the same keys in pages, though those out of sight are gone."""
    step = Step([(30, 170)], heads=6, head_dim=64, page_size=16, dtype=dtype)
    kernel = compiled(64, 3, dtype)
    (segment,) = step.segments
    lines = step.pool[:, torch.from_numpy(segment.pages).long()].flatten(1, 2)
    for window, first in ((None, 0), (50, 121)):
        positions = np.arange(first, 200)[None]
        key, value = lines[:, None, first:200]
        output = torch.empty_like(step.query)

        work = find_selected_work(positions, 170, 30, window, 3, 2)
        kernel.attend(work, step.query.transpose(0, 1), key, value, output, 64**-0.5)

        assert torch.equal(output, step.attend(kernel, window))


@needs_compiler
def test_each_head_attends_over_its_own_choice() -> None:
    """Positions may differ from KV head to KV head, and rows among the keys see none behind them."""
    step = Step([(4, 96)], heads=6, head_dim=64, page_size=100, dtype=torch.float32)
    rng = np.random.default_rng(3)
    chosen = np.stack([np.sort(rng.choice(96, 40, replace=False)) for _ in range(2)])
    positions = np.concatenate([chosen, np.tile(np.arange(96, 100), (2, 1))], axis=1)
    parts = [[step.pool[half, 0, positions[head], head] for head in range(2)] for half in range(2)]
    key, value = (torch.stack(part, dim=1)[None] for part in parts)
    output = torch.empty_like(step.query)

    work = find_selected_work(positions, 96, 4, None, 3, 2)
    compiled(64, 3).attend(work, step.query.transpose(0, 1), key, value, output, 64**-0.5)

    for row in range(4):
        for head in range(6):
            seen = positions[head // 3] <= 96 + row
            keys, values = (part[head // 3][torch.from_numpy(seen)].double() for part in parts)
            weights = (keys @ step.query[row, head].double() * 64**-0.5).softmax(0)
            torch.testing.assert_close(output[row, head].double(), weights @ values, atol=2e-5, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [0, 1])
def test_nan_among_the_keys_comes_out_as_nan(half: int, dtype: torch.dtype) -> None:
    """Broken KV is never smoothed over: the sampler is to see it and fail the request."""
    step = Step([(10, 100)], heads=2, head_dim=64, page_size=16, dtype=dtype)
    step.pool[half, step.segments[0].pages[1], 3] = float("nan")

    assert step.attend(compiled(64, 1, dtype), None).isnan().all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_behind_a_segment_are_not_looked_at(dtype: torch.dtype) -> None:
    """What another request left in the rest of a page, and in pages of room to come, poisons nothing."""
    step = Step([(10, 25)], heads=2, head_dim=64, page_size=16, dtype=dtype)
    kernel = compiled(64, 1, dtype)
    expected = step.attend(kernel, None)
    (segment,) = step.segments
    step.pool = torch.cat([step.pool, torch.full_like(step.pool[:, :1], float("nan"))], dim=1)
    step.pool[:, segment.pages[2], 35 % 16 :] = float("nan")
    step.segments = [Segment(10, 25, np.append(segment.pages, np.int32(3)))]

    assert torch.equal(step.attend(kernel, None), expected)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_apart_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    """Scores in the thousands, the largest in any block, leave the value of the likeliest key."""
    step = Step([(8, 300)], heads=2, head_dim=64, page_size=16, dtype=dtype)
    step.query *= 300

    found = step.attend(compiled(64, 1, dtype), None)

    torch.testing.assert_close(found.double(), step.expected(None), atol=3e-2, rtol=3e-2)


def test_half_precision_is_left_to_the_portable_path() -> None:
    """The C code has float and bfloat16."""
    assert compile_extend(32, 2, torch.float16) is None
