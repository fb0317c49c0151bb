"""One request's prefix, chosen and loaded layer by layer, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bench.stored_prefix import StoredPrefix
from services.worker.importance.identification import ProbeHeads, Rows
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule
from services.worker.importance.kept_kv import KeptInMemory
from services.worker.importance.selection import Budget
from shared.errors import ConfigError
from shared.messages.sparse_reads import code_bytes

LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 3, 4, 40, 8
VECTOR = HEAD_DIM * 4


def make_kv(*, agreeing: bool) -> torch.Tensor:
    """KV of which heads 0 to 2 have equal keys, or not; the first eight tokens of layer l start at 4 * l."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM, generator=generator)
    if agreeing:
        kv[:, 0] = -1.0
        for layer in range(LAYERS):
            kv[layer, 0, 4 * layer : 4 * layer + 10] = 1.0
    return kv


QUERY = torch.ones(KV_HEADS, 2, HEAD_DIM)
OWN = torch.zeros(KV_HEADS, 2, HEAD_DIM)
AT = torch.arange(TOKENS, TOKENS + 2)


def rows(window: int | None = None) -> Rows:
    return Rows(QUERY, TOKENS, 1.0, window, None)


def kept_of(prefix: ImportantPrefix, layer: int) -> torch.Tensor:
    """K and V of what a layer chose, [2, KV_HEADS, k, HEAD_DIM]."""
    assert isinstance(prefix.kept, KeptInMemory)
    return prefix.kept.kv[layer]


RULE = LoadingRule(Budget(0.25), "h2o")


def test_heads_that_agree_read_what_they_need() -> None:
    """Three heads' keys, and K and V of a quarter of the tokens (IMPRESS Figure 9)."""
    kv = make_kv(agreeing=True)
    prefix = ImportantPrefix(StoredPrefix(kv, (0, 1, 2)), RULE, LAYERS)

    prefix.choose(1, rows(), OWN, AT)

    assert prefix.positions[1].tolist() == [list(range(4, 14))]
    assert torch.equal(kept_of(prefix, 1), kv[1, :, 4:14].transpose(1, 2))
    assert prefix.bytes_read.by_kind() == {
        "probe_keys": 3 * TOKENS * code_bytes(HEAD_DIM),
        "chosen": 2 * KV_HEADS * 10 * VECTOR,
        "fallback_keys": 0,
        "fallback_values": 0,
    }


def test_heads_that_disagree_read_all_keys_and_values_of_their_own() -> None:
    """Every head attends over what itself finds important; its K was read for choosing, not rounded."""
    kv = make_kv(agreeing=False)
    prefix = ImportantPrefix(StoredPrefix(kv, (0, 1, 2)), RULE, LAYERS)

    prefix.choose(0, rows(), OWN, AT)

    assert prefix.positions[0].shape == (KV_HEADS, 10)
    assert prefix.layers_fallen_back == 1
    for head, tokens in enumerate(prefix.positions[0]):
        best = (kv[0, 0, :, head] @ QUERY[head, 0]).topk(10).indices.sort().values
        assert tokens.tolist() == best.tolist()
        assert torch.equal(kept_of(prefix, 0)[:, head], kv[0, :, tokens, head])
    assert prefix.bytes_read.by_kind() == {
        "probe_keys": 3 * TOKENS * code_bytes(HEAD_DIM),
        "chosen": 0,
        "fallback_keys": KV_HEADS * TOKENS * VECTOR,
        "fallback_values": KV_HEADS * 10 * VECTOR,
    }


class KeysWanted(StoredPrefix):
    """Notes which keys are to be prefetched."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv, ())
        self.read: list[tuple[int, int]] = []
        self.wanted: list[tuple[int, int, tuple[int, ...], int]] = []
        self.is_busy = False

    def probe_keys(self, layer: int, heads: Sequence[int], start: int, layers: int = 1) -> tuple[torch.Tensor, int]:
        self.read.append((layer, layers))
        return super().probe_keys(layer, heads, start, layers)

    def prefetch_keys(self, layer: int, layers: int, heads: Sequence[int], start: int) -> bool:
        if not self.is_busy:
            self.wanted.append((layer, layers, tuple(heads), start))
        return not self.is_busy


def test_keys_are_prefetched_as_far_as_the_next_layer_sees() -> None:
    """Where windows take turns, that is what the layer before this one saw; the last layer has no successor."""
    layers = [12, None, 12, None, 12]
    source = KeysWanted(make_kv(agreeing=True).repeat(2, 1, 1, 1, 1))
    prefix = ImportantPrefix(source, RULE, len(layers))

    for layer, window in enumerate(layers):
        prefix.choose(layer, rows(window), OWN, AT)

    probe = (0, 1, 2)
    seen = TOKENS - 11
    assert source.wanted == [(1, 1, probe, seen), (2, 1, probe, seen), (3, 1, probe, 0), (4, 1, probe, seen)]


def test_without_windows_one_read_brings_keys_of_several_layers() -> None:
    """The first one too, and the next begins two layers before its keys are needed."""
    source = KeysWanted(make_kv(agreeing=True).repeat(4, 1, 1, 1, 1))
    prefix = ImportantPrefix(source, RULE, 12)

    begun = []
    for layer in range(12):
        prefix.choose(layer, rows(), OWN, AT)
        begun.append([(first, count) for first, count, _, _ in source.wanted])
        source.wanted.clear()

    assert source.read == [(0, 4), *((layer, 1) for layer in range(1, 12))]
    assert begun == [[], [(4, 4)], [], [], [], [(8, 4)], *[[]] * 6]


def test_keys_of_heads_that_copies_do_not_have_apart_are_prefetched_by_layer() -> None:
    """A storage reads several layers at once only of the probe heads that it keeps apart, the first three."""
    source = KeysWanted(make_kv(agreeing=True).repeat(2, 1, 1, 1, 1))
    prefix = ImportantPrefix(source, LoadingRule(Budget(0.25), "h2o", ProbeHeads(4)), 6)

    for layer in range(6):
        prefix.choose(layer, rows(), OWN, AT)

    assert source.wanted == [(layer, 1, (0, 1, 2, 3), 0) for layer in range(1, 6)]


def test_a_read_of_keys_that_was_not_begun_is_tried_again() -> None:
    """By the next layer, for what it still lacks."""
    source = KeysWanted(make_kv(agreeing=True).repeat(2, 1, 1, 1, 1))
    prefix = ImportantPrefix(source, RULE, 6)
    source.is_busy = True
    for layer in (0, 1):
        prefix.choose(layer, rows(), OWN, AT)
    source.is_busy = False

    prefix.choose(2, rows(), OWN, AT)

    assert source.wanted == [(4, 2, (0, 1, 2), 0)]


def test_prefetching_keys_can_be_left_off() -> None:
    """Each layer asks for its keys when it is computed."""
    source = KeysWanted(make_kv(agreeing=True))
    prefix = ImportantPrefix(source, RULE, LAYERS, prefetches_keys=False)

    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)

    assert source.wanted == []


def test_a_layer_is_chosen_once() -> None:
    """Later steps attend over what the first chose, and read nothing."""
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=True), ()), RULE, LAYERS)
    prefix.choose(0, rows(), OWN, AT)
    read, first = prefix.bytes_read.total, prefix.positions[0]

    later = Rows(-QUERY[:, :1], TOKENS + 2, 1.0, None, None)
    prefix.choose(0, later, torch.zeros(KV_HEADS, 3, HEAD_DIM), torch.arange(TOKENS, TOKENS + 3))

    assert prefix.positions[0] is first
    assert prefix.bytes_read.total == read


def test_a_window_limits_what_is_read() -> None:
    """Only what the first row can see is looked at: eleven tokens under a window of twelve, and a quarter is loaded."""
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=True), ()), RULE, LAYERS)

    prefix.choose(0, rows(window=12), OWN, AT)

    assert prefix.positions[0].shape == (1, 3)
    assert int(prefix.positions[0].min()) >= TOKENS - 11
    assert prefix.bytes_read.by_kind()["probe_keys"] == 3 * 11 * VECTOR


def test_a_window_may_have_left_the_prefix() -> None:
    """Then nothing is read."""
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=True), ()), RULE, LAYERS)

    prefix.choose(0, rows(window=1), OWN, AT)

    assert kept_of(prefix, 0).shape == (2, KV_HEADS, 0, HEAD_DIM)
    assert prefix.bytes_read.total == 0


def test_probe_heads_and_tokens_kept_are_settings() -> None:
    """One probe head reads one head's keys; kept tokens are there whatever their score."""
    rule = LoadingRule(Budget(0.25, first_tokens=1, recent_tokens=2), "last", ProbeHeads(1))
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=True), ()), rule, LAYERS)

    prefix.choose(2, rows(), OWN, AT)

    assert prefix.positions[2].tolist() == [[0, *range(8, 15), 38, 39]]
    assert prefix.bytes_read.by_kind()["probe_keys"] == TOKENS * VECTOR


def test_a_rule_with_an_unknown_metric_is_refused() -> None:
    """When it is made, not in the middle of a forward pass."""
    with pytest.raises(ConfigError, match="metric"):
        LoadingRule(Budget(0.5), "luck")
