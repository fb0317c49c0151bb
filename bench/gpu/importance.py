"""Loading only the important part of a prefix from host memory, against loading all of it (IMPRESS section 4).

Random weights of Llama-3.1-8B. A prefix lies in host memory; a question of 32 tokens comes. Either all pages are
loaded, verified, by the mover that serves by default, and the question is computed over them; or each layer reads the
keys of its probe heads, chooses, and reads what it has chosen, in the middle of the step. Bytes and time are counted by
the share that is kept. With a share of 1 the answers of both ways are compared.

Random weights know nothing of importance, and their heads do not agree: ``agreed`` has the probe heads choose for all
whatever they say, ``by_head`` has every head choose for itself, which reads all keys. Between these two lies what a
trained model does. So these are figures of moving and of choosing, and none of quality. What a storage does before,
reading its disk, is not in them; see ``bench/gpu/host_prefix.py``.

``python -m bench.gpu.importance [--quick | --cpu] [--rounds 9]``
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.gpu import reading
from bench.gpu.host_prefix import HostPrefix
from bench.gpu.models import LLAMA_8B, SHALLOW_LAYERS, TINY, random_runner
from bench.hidden_states import PAGE_SIZE, History
from services.worker.engine.attention import AttentionStep
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.importance.identification import ProbeHeads
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.selection import Budget
from services.worker.restore.layer_mix import LayerMix

QUESTION_TOKENS = 32
SHARES = (0.1, 0.25, 1.0, 0.05, 0.5)
LENGTHS = (16_384, 4096)
AGREEING, DISAGREEING = 1e9, 0.0
"""Values of alpha: the threshold is the similarity by chance to this power, so nothing or everything is asked."""

WAYS = {"agreed": (ProbeHeads(), AGREEING), "by_head": (ProbeHeads(), DISAGREEING)}


class Question:
    """Asked behind the first ``tokens`` tokens of a history whose KV is in host memory."""

    def __init__(self, history: History, tokens: int, run: reading.Reading) -> None:
        self._history, self._runner, self._tokens, self._run = history, history.runner, tokens, run
        rows = torch.arange(QUESTION_TOKENS)
        self._ids, self._positions = rows * 7919 % self._runner.vocab_size, tokens + rows
        self._last_rows = rows[-1:]
        pages = tokens // PAGE_SIZE
        # Its own rows go to pages that no length of the history has.
        own = np.setdiff1d(np.arange(self._runner.pool.pages, dtype=np.int32), history.table)
        self._table = np.concatenate([history.table[:pages], own])
        kv = history.expected[:, :, :pages].flatten(2, 3)
        self._source = HostPrefix(kv, self._runner.pool.device)

    def in_full(self) -> tuple[dict[str, Any], torch.Tensor]:
        """Load all pages, then answer. The last logits come with it."""
        loads, steps = [], []
        logits = torch.empty(0)
        for number in range(self._run.rounds + 1):
            loaded = self._history.restore(self._tokens, LayerMix(0, 0, self._runner.geometry.layers), 0.0)
            meta = self._meta()
            stepped, logits = self._timed(self._runner.paged_step(meta))
            if number:
                loads.append(loaded)
                steps.append(stepped)
        load_s, step_s = statistics.median(loads), statistics.median(steps)
        nbytes = self._tokens * self._runner.geometry.token_bytes
        return {"bytes": nbytes, "load_ms": load_s * 1e3, "ms": (load_s + step_s) * 1e3}, logits

    def in_part(self, share: float, way: str) -> tuple[dict[str, Any], torch.Tensor]:
        """Answer, and load on the way what matters."""
        heads, alpha = WAYS[way]
        rule = LoadingRule(Budget(share), probe_heads=heads, alpha=alpha)
        times = []
        for number in range(self._run.rounds + 1):
            prefix = ImportantPrefix(self._source, rule, self._runner.geometry.layers)
            step = ImportanceStep(self._meta(), self._runner.pool, self._runner.attention, {0: prefix})
            spent, logits = self._timed(step)
            if number:
                times.append(spent)
        figures = {
            "share": share,
            "way": way,
            "bytes": prefix.bytes_read.total,
            "bytes_by_kind": prefix.bytes_read.by_kind(),
            "layers_fallen_back": prefix.layers_fallen_back,
            "reading_ms": prefix.stall_s * 1e3,
            "ms": statistics.median(times) * 1e3,
        }
        return figures, logits

    def _meta(self) -> ForwardMeta:
        segment = Segment(QUESTION_TOKENS, self._tokens, self._table)
        return ForwardMeta.build([segment], PAGE_SIZE, self._runner.pool.device)

    def _timed(self, step: AttentionStep) -> tuple[float, torch.Tensor]:
        self._run.synchronize()
        began = time.perf_counter()
        logits = self._runner.run(self._ids, self._positions, step, self._last_rows)
        self._run.synchronize()
        return time.perf_counter() - began, logits


def compare(in_full: torch.Tensor, in_part: torch.Tensor) -> None:
    """Raise SystemExit unless all of a prefix, loaded the one way or the other, gives one answer."""
    spread = in_full.std().clamp_min(1e-12)
    deviation = ((in_part - in_full) / spread).square().mean().sqrt().item()
    if not deviation <= 0.1:
        raise SystemExit(f"all of a prefix, loaded in parts, gives other logits: relative deviation {deviation:.3g}")


def make_history(run: reading.Reading, lengths: tuple[int, ...]) -> History:
    """A runner with the longest prefix computed, and room for the question behind it."""
    shape = run.choose(LLAMA_8B, LLAMA_8B | {"num_hidden_layers": SHALLOW_LAYERS}, TINY)
    room = max(lengths) + QUESTION_TOKENS
    runner = random_runner(shape, most_tokens=room, pool_tokens=room, page_size=PAGE_SIZE, device=run.device)
    return History(runner, max(lengths))


def main() -> None:
    run = reading.begin("importance", __doc__)
    lengths = run.choose(LENGTHS, LENGTHS[1:], (96,))
    shares = run.choose(SHARES, SHARES, SHARES[1:3])
    history = make_history(run, lengths)
    found: list[dict[str, Any]] = []
    results: dict[str, Any] = {"question_tokens": QUESTION_TOKENS, "lengths": found}
    try:
        for tokens in run.each(lengths):
            question = Question(history, tokens, run)
            in_full, expected = question.in_full()
            parts: list[dict[str, Any]] = []
            found.append({"tokens": tokens, "in_full": in_full, "in_part": parts})
            for share, way in run.each([(share, way) for share in shares for way in WAYS]):
                figures, logits = question.in_part(share, way)
                if share == 1.0:
                    compare(expected, logits)
                of_full = {"of_bytes": figures["bytes"] / in_full["bytes"], "speedup": in_full["ms"] / figures["ms"]}
                parts.append(figures | of_full)
                run.keep(results)
        run.finish(results, headline(found))
    finally:
        history.close()
        history.runner.close()


def headline(found: list[dict[str, Any]]) -> reading.Headline:
    """Time against full loading, with the share of the bytes."""
    return [
        (
            f"{length['tokens']} tokens, {part['share']:g} kept, {part['way']}",
            part["speedup"],
            f"times as fast as in full, {100 * part['of_bytes']:.0f}% of the bytes",
        )
        for length in found
        for part in length["in_part"]
    ]


if __name__ == "__main__":
    main()
