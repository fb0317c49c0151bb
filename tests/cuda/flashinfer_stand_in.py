"""A module ``flashinfer`` in plain torch, which holds its callers to the rules of the real one's source.

Calls are bound by the recorded signatures of a version (``flashinfer_signatures.json``). Kernels read what the device
holds when they run: in CUDA graph mode the buffers that the wrapper was made with, and the division that the last plan
left in its integer workspace. That division is copied from memory of the wrapper's that the next plan overwrites, which
on a ``stream`` happens when somebody waits. While ``is_capturing`` nothing may be made or planned.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda.late_device import LateStream
from tests.cuda.record_flashinfer import DECODE, PREFILL, TABLE

SIGNATURES: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
VERSIONS = tuple(SIGNATURES)


@dataclass
class Machine:
    """Of one test."""

    version: str = VERSIONS[-1]
    takes_float32: bool = False  # As the real one does not, so that small models can be served.
    is_capturing: bool = False
    is_fake: bool = False  # Kernels compute nothing: numbers on the device are none.
    stream: LateStream | None = None
    planned: list[str] = field(default_factory=list)  # The wrappers' classes, by plan.
    ran: list[str] = field(default_factory=list)

    def launch(self, work: Callable[[], object]) -> None:
        if self.stream is None:
            work()
        else:
            self.stream.launch(torch.inference_mode()(work))

    def outside_captures(self, what: str) -> None:
        if self.is_capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def _signature(version: str, name: str) -> inspect.Signature:
    parameters, is_by_name = [], False
    for each in SIGNATURES[version][name].split():
        if each == "*":
            is_by_name = True
            continue
        kind = inspect.Parameter.KEYWORD_ONLY if is_by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = None if each.endswith("=") else inspect.Parameter.empty
        parameters.append(inspect.Parameter(each.rstrip("="), kind, default=default))
    return inspect.Signature(parameters)


class _Wrapper:
    """Both wrappers. ``buffers`` are the constructor's names of rows, starts, pages and last of ``PageLists``."""

    machine: Machine
    name: str
    buffers: tuple[str, str, str, str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("__init__", *args, **kwargs)
        self.machine.outside_captures("a wrapper is made")
        assert given["float_workspace_buffer"].dtype == torch.uint8
        assert given.get("kv_layout") == "NHD"
        self.backend = given.get("backend") or "auto"
        self.use_tensor_cores = bool(given.get("use_tensor_cores"))
        self.is_graph = bool(given.get("use_cuda_graph"))
        self.kept: list[Any] = [given.get(name) for name in self.buffers]
        if self.is_graph:
            rows, starts, pages, last = self.kept
            assert all(torch.is_tensor(each) and each.dtype == torch.int32 for each in (starts, pages, last))
            assert len(starts) == len(last) + 1
            assert rows is None or len(rows) == len(starts)
        self._plan: dict[str, Any] = {}
        self._most_rows = 0
        self._division = torch.empty(8 * 2**20, dtype=torch.uint8, device=given["float_workspace_buffer"].device)
        self._pinned = torch.empty_like(self._division, device="cpu")

    def reset_workspace_buffer(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("reset_workspace_buffer", *args, **kwargs)
        self._division = given["int_workspace_buffer"]
        assert self._division.dtype == torch.uint8
        self._pinned = torch.empty_like(self._division, device="cpu")

    def _bind(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = _signature(self.machine.version, f"{self.name}.{method}").bind(self, *args, **kwargs)
        return bound.arguments

    def _planned(self, lists: list[Any], given: dict[str, Any], **settings: Any) -> None:
        self.machine.outside_captures("a plan is made")
        self.machine.planned.append(self.name)
        rows, starts, pages, last = lists
        assert all(each.dtype == torch.int32 for each in lists)
        assert len(rows) == len(starts) == len(last) + 1
        assert rows.device == starts.device == last.device == torch.device("cpu"), "offsets would be read back"
        assert pages.device.type == self._division.device.type, "pages would be waited for"
        assert int(starts[-1]) == len(pages)
        assert bool((starts[1:] > starts[:-1]).all()), "every request of ours reads something"
        size = given["page_size"]
        assert bool(((last >= 1) & (last <= size)).all())
        lengths = (starts[1:] - starts[:-1] - 1) * size + last
        assert torch.equal(given.get("seq_lens", lengths), lengths)
        assert given["sm_scale"] is not None
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        if self.is_graph:
            kept = [each for each in self.kept if each is not None]
            assert len(last) == len(self.kept[3]), "the batch size is fixed in cudagraph mode"
            self._most_rows = self._most_rows or int(rows[-1])
            assert int(rows[-1]) <= self._most_rows, "more rows than in the first plan"
            for buffer, new in zip(kept, [each for each in lists if len(kept) == 4 or each is not rows], strict=True):
                assert len(new) <= len(buffer)
                self.machine.launch(functools.partial(buffer[: len(new)].copy_, new))
            lists = [rows if self.kept[0] is None else self.kept[0], *self.kept[1:]]
        # The division among programs depends on lengths alone: it stands for them here.
        count = 4 * len(lengths)
        self._pinned[:count] = lengths.contiguous().view(torch.uint8)
        self.machine.launch(lambda: self._division[:count].copy_(self._pinned[:count]))
        self._plan = {"lists": lists, "size": size, "count": count, **given, **settings}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = self._bind("run", *args, **kwargs)
        assert self._plan, "run before plan"
        self.machine.ran.append(self.name)
        plan, q, (k, v) = self._plan, given["q"], given["paged_kv_cache"]
        assert q.is_contiguous()
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"])
        assert k.shape[1:] == v.shape[1:] == (plan["size"], plan["num_kv_heads"], plan["head_dim"])
        assert (q.dtype, k.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert q.dtype in (torch.float16, torch.bfloat16) or self.machine.takes_float32
        out, sums = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.machine.launch(lambda: self._compute(plan, q, k, v, out, sums))
        return (out, sums) if given.get("return_lse") else out

    def _compute(self, plan: dict[str, Any], q: Any, k: Any, v: Any, out: Any, sums: Any) -> None:
        if self.machine.is_fake:
            return
        with _disable_current_modes():
            rows, starts, pages, last = (each.tolist() for each in plan["lists"])
            lengths = [
                (end - start - 1) * plan["size"] + some
                for start, end, some in zip(starts[:-1], starts[1:], last, strict=True)
            ]
            divided = self._division[: plan["count"]].view(torch.int32).tolist()
            assert divided == lengths, "planned for other lengths"
            assert rows[-1] == len(q)
            for number, length in enumerate(lengths):
                some = slice(rows[number], rows[number + 1])
                key, value = (
                    half[pages[starts[number] : starts[number + 1]]].flatten(0, 1)[:length].float() for half in (k, v)
                )
                _attend(plan, q[some].float(), key, value, out[some], sums[some])


def _attend(plan: dict[str, Any], q: Any, key: Any, value: Any, out: Any, sums: Any) -> None:
    """The rows of one request; ``sums`` are logarithms to the base 2, as the real one's."""
    if not len(q):
        return
    group = q.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", q, key) * plan["sm_scale"]
    if plan.get("logits_soft_cap"):
        scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
    behind = torch.arange(len(key) - len(q), len(key))[:, None] - torch.arange(len(key))
    hidden = torch.zeros_like(behind).bool()
    if plan["causal"]:
        hidden |= behind < 0
    if plan.get("window_left", -1) >= 0:
        hidden |= behind > plan["window_left"]
    scores = scores.masked_fill(hidden, float("-inf"))
    out.copy_(torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), value))
    sums.copy_(torch.logsumexp(scores, dim=-1).T / torch.log(torch.tensor(2.0)))


class _Decode(_Wrapper):
    name = DECODE
    buffers = ("", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("plan", *args, **kwargs)
        assert self.use_tensor_cores or given["num_qo_heads"] // given["num_kv_heads"] in (1, 2, 3, 4, 6, 8, 16)
        rows = torch.arange(len(given["indptr"]), dtype=torch.int32)
        lists = [rows, given["indptr"], given["indices"], given["last_page_len"]]
        self._planned(lists, given, causal=False)


class _Prefill(_Wrapper):
    name = PREFILL
    buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("plan", *args, **kwargs)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        causal = bool(given.get("causal"))
        self._planned([given[name] for name in names], given, causal=causal, head_dim=given["head_dim_qk"])


def _merge(v: Any, s: Any, v_other: Any, s_other: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert v.shape == v_other.shape
    assert s.shape == s_other.shape == v.shape[:2]
    assert s.dtype == s_other.dtype == torch.float32
    assert all(each.is_contiguous() for each in (v, s, v_other, s_other))
    most = torch.maximum(s, s_other)
    mine, theirs = torch.exp2(s - most), torch.exp2(s_other - most)
    total = mine + theirs
    merged = (v.float() * mine[..., None] + v_other.float() * theirs[..., None]) / total[..., None]
    return merged.to(v.dtype), torch.log2(total) + most


def module(machine: Machine | None = None) -> ModuleType:
    """To stand in ``sys.modules``."""
    of = machine or Machine()

    def merge_state(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = _signature(of.version, "merge_state").bind(*args, **kwargs).arguments
        of.ran.append("merge_state")
        return _merge(*(given[name] for name in ("v_a", "s_a", "v_b", "s_b")))

    def merge_state_in_place(*args: Any, **kwargs: Any) -> None:
        given = _signature(of.version, "merge_state_in_place").bind(*args, **kwargs).arguments
        v, s, mask = given["v"], given["s"], given.get("mask")
        merged, total = _merge(v, s, given["v_other"], given["s_other"])
        of.ran.append("merge_state_in_place")
        keep = torch.ones(len(v), device=v.device).bool() if mask is None else mask.bool()
        assert len(keep) == len(v)
        v.copy_(torch.where(keep[:, None, None], merged, v))
        s.copy_(torch.where(keep[:, None], total, s))

    made: Any = ModuleType("flashinfer")
    made.__spec__ = __spec__
    made.BatchDecodeWithPagedKVCacheWrapper = type(DECODE, (_Decode,), {"machine": of})
    made.BatchPrefillWithPagedKVCacheWrapper = type(PREFILL, (_Prefill,), {"machine": of})
    made.merge_state, made.merge_state_in_place = merge_state, merge_state_in_place
    return made  # type: ignore[no-any-return]
