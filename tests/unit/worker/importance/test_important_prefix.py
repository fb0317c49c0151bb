"""One request's prefix, chosen and loaded layer by layer, without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from bench.stored_prefix import StoredPrefix
from services.worker.importance.identification import ProbeHeads, Rows
from services.worker.importance.important_prefix import ImportantPrefix, LoadingRule, Speculation
from services.worker.importance.kept_kv import KeptInMemory
from services.worker.importance.selection import Budget
from services.worker.importance.speculation import ReadAhead
from services.worker.importance.speculation_control import ControlSettings, SpeculationControl
from shared.errors import ConfigError, IntegrityError

LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 3, 4, 40, 8
VECTOR = HEAD_DIM * 4
ALWAYS = ControlSettings(waste_weight=0.0)


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


@pytest.fixture
def read_ahead() -> Iterator[ReadAhead]:
    made = ReadAhead(reads=1)
    yield made
    made.close()


def speculating(read_ahead: ReadAhead, settings: ControlSettings = ALWAYS) -> Speculation:
    return Speculation(read_ahead, SpeculationControl(settings))


RULE = LoadingRule(Budget(0.25), "h2o")


def test_heads_that_agree_read_what_they_need() -> None:
    """Three heads' keys, and K and V of a quarter of the tokens (IMPRESS Figure 9)."""
    kv = make_kv(agreeing=True)
    prefix = ImportantPrefix(StoredPrefix(kv, (0, 1, 2)), RULE, LAYERS)

    prefix.choose(1, rows(), OWN, AT)

    assert prefix.positions[1].tolist() == [list(range(4, 14))]
    assert torch.equal(kept_of(prefix, 1), kv[1, :, 4:14].transpose(1, 2))
    assert prefix.bytes_read.by_kind() == {
        "probe_keys": 3 * TOKENS * VECTOR,
        "on_demand": 2 * KV_HEADS * 10 * VECTOR,
        "speculative": 0,
        "fallback_keys": 0,
        "fallback_values": 0,
    }


def test_heads_that_disagree_read_all_keys_and_values_of_their_own() -> None:
    """Every head attends over what itself finds important; its K was read for choosing."""
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
        "probe_keys": 3 * TOKENS * VECTOR,
        "on_demand": 0,
        "speculative": 0,
        "fallback_keys": TOKENS * VECTOR,
        "fallback_values": KV_HEADS * 10 * VECTOR,
    }


@pytest.mark.parametrize("agreeing", [True, False])
def test_reading_ahead_changes_no_bit(agreeing: bool, read_ahead: ReadAhead) -> None:
    """What is selected is the same, layer by layer, whether it was read ahead or on demand."""
    source = StoredPrefix(make_kv(agreeing=agreeing), (0, 1, 2))
    plain = ImportantPrefix(source, RULE, LAYERS)
    ahead = ImportantPrefix(source, RULE, LAYERS, speculating(read_ahead))

    for layer in range(LAYERS):
        plain.choose(layer, rows(), OWN, AT)
        ahead.choose(layer, rows(), OWN, AT)
        assert torch.equal(kept_of(ahead, layer), kept_of(plain, layer))
        assert torch.equal(ahead.positions[layer], plain.positions[layer])
    assert [outcome.speculated_bytes > 0 for outcome in ahead.outcomes] == [False, True, True]


class KeysWanted(StoredPrefix):
    """Notes which keys are to be read ahead."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv, ())
        self.wanted: list[tuple[int, tuple[int, ...], int]] = []

    def prefetch_keys(self, layer: int, heads: Sequence[int], start: int) -> None:
        self.wanted.append((layer, tuple(heads), start))


def test_keys_are_read_ahead_as_far_as_the_next_layer_sees(read_ahead: ReadAhead) -> None:
    """Where windows take turns, that is what the layer before this one saw; the last layer has no successor."""
    layers = [None, 12, None, 12, None]
    source = KeysWanted(make_kv(agreeing=True).repeat(2, 1, 1, 1, 1))
    prefix = ImportantPrefix(source, RULE, len(layers), speculating(read_ahead))

    for layer, window in enumerate(layers):
        prefix.choose(layer, rows(window), OWN, AT)

    probe = (0, 1, 2)
    assert source.wanted == [(1, probe, 0), (2, probe, 0), (3, probe, TOKENS - 11), (4, probe, 0)]


def test_nothing_is_read_ahead_without_speculation() -> None:
    """Neither keys nor what is behind them."""
    source = KeysWanted(make_kv(agreeing=True))
    prefix = ImportantPrefix(source, RULE, LAYERS)

    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)

    assert source.wanted == []
    assert prefix.bytes_read.by_kind()["speculative"] == 0


def test_outcomes_count_what_was_guessed_right(read_ahead: ReadAhead) -> None:
    """Layers move on by four tokens of ten, so six of ten are guessed, and four wasted."""
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=True), ()), RULE, LAYERS, speculating(read_ahead))
    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)

    first, second, third = prefix.outcomes
    token = 2 * KV_HEADS * VECTOR
    assert (first.speculated_bytes, first.on_demand_bytes) == (0, 10 * token)
    for outcome in (second, third):
        assert (outcome.recall, outcome.precision) == (0.6, 0.6)
        assert (outcome.wasted_bytes, outcome.on_demand_bytes) == (4 * token, 4 * token)
    assert prefix.bytes_read.by_kind()["speculative"] == 20 * token
    assert prefix.bytes_read.by_kind()["on_demand"] == 18 * token


def test_values_read_ahead_serve_a_fallback(read_ahead: ReadAhead) -> None:
    """Of what was read ahead a layer that falls back needs V alone: less than half of the bytes can be of use."""
    prefix = ImportantPrefix(StoredPrefix(make_kv(agreeing=False), ()), RULE, LAYERS, speculating(read_ahead))
    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)

    for outcome in prefix.outcomes[1:]:
        assert outcome.needed_bytes == KV_HEADS * 10 * VECTOR
        assert 0 < outcome.precision <= 0.5
        assert outcome.on_demand_bytes == outcome.needed_bytes - outcome.hit_bytes


def test_a_layer_whose_guess_does_not_pay_is_left_alone(read_ahead: ReadAhead) -> None:
    """After the trial nothing is read ahead for it any more, and all of it is read on demand."""
    speculation = speculating(read_ahead, ControlSettings(trial_outcomes=1, waste_weight=1e9, pause_s=1e9))
    source = StoredPrefix(make_kv(agreeing=True), ())
    made = [ImportantPrefix(source, RULE, LAYERS, speculation) for _ in range(2)]
    for prefix in made:
        for layer in range(LAYERS):
            prefix.choose(layer, rows(), OWN, AT)

    assert [outcome.speculated_bytes > 0 for outcome in made[0].outcomes] == [False, True, True]
    assert [outcome.speculated_bytes for outcome in made[1].outcomes] == [0, 0, 0]


class TornAhead(StoredPrefix):
    """Every read on another thread than the test's fails."""

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise IntegrityError("torn")
        return super().gather(layer, tokens)


def test_a_read_ahead_that_fails_is_read_on_demand(read_ahead: ReadAhead) -> None:
    """Nothing of it is used, all of it is waste, and what is selected is the same."""
    prefix = ImportantPrefix(TornAhead(make_kv(agreeing=True), ()), RULE, LAYERS, speculating(read_ahead))

    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)

    assert [prefix.positions[layer][0].tolist() for layer in range(LAYERS)] == [
        list(range(4 * layer, 4 * layer + 10)) for layer in range(LAYERS)
    ]
    for outcome in prefix.outcomes[1:]:
        assert (outcome.hit_bytes, outcome.recall) == (0, 0.0)
        assert outcome.wasted_bytes == outcome.speculated_bytes == outcome.on_demand_bytes


class SlowAhead(StoredPrefix):
    """Reads on another thread than the test's wait for ``gate``."""

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(kv, ())
        self.gate = threading.Event()

    def gather(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30.0)
        return super().gather(layer, tokens)


def test_a_request_that_ends_early_lets_go_of_its_source(read_ahead: ReadAhead) -> None:
    """Its memory may be given to others only when what is being read ahead has been read, waited for or overdue."""
    source = SlowAhead(make_kv(agreeing=True))
    speculation = Speculation(read_ahead, SpeculationControl(ALWAYS), deadline_s=0.0)
    waiting, overdue = (ImportantPrefix(source, RULE, LAYERS, speculation) for _ in range(2))
    assert waiting.let_go()
    waiting.choose(0, rows(), OWN, AT)
    overdue.choose(0, rows(), OWN, AT)  # The thread is busy, so nothing is read ahead for this one.
    assert (waiting.let_go(), overdue.let_go()) == (False, True)
    waiting.choose(1, rows(), OWN, AT)
    assert not waiting.let_go()

    source.gate.set()
    read_ahead.close()

    assert waiting.let_go()


def test_an_overdue_read_holds_nobody_up(read_ahead: ReadAhead) -> None:
    """The layer reads on demand, and the next one is not read ahead for, because the thread is busy."""
    source = SlowAhead(make_kv(agreeing=True))
    speculation = Speculation(read_ahead, SpeculationControl(ALWAYS), deadline_s=0.0)
    prefix = ImportantPrefix(source, RULE, LAYERS, speculation)

    for layer in range(LAYERS):
        prefix.choose(layer, rows(), OWN, AT)
    source.gate.set()

    assert [outcome.speculated_bytes > 0 for outcome in prefix.outcomes] == [False, True, False]
    assert [outcome.hit_bytes for outcome in prefix.outcomes] == [0, 0, 0]


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
