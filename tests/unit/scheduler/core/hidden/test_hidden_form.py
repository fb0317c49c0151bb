"""In which form prefixes are kept: what is asked for, and what restoring costs."""

import pytest
from msgspec import structs

from services.scheduler.core.cache.page_pool import new_pool
from services.scheduler.core.hidden.hidden_form import (
    COMPARED_TOKENS,
    can_restore,
    form_fault,
    is_worth_keeping,
    parse_form,
    wanted_hidden,
)
from services.scheduler.core.hidden.partition import LayerCosts, hidden_only, kv_only, layer_times, made, tokens_only
from services.scheduler.core.state import CellState, Storage, Worker, new_state
from services.scheduler.core.tiers.under_way import DiskTier, Fetching
from shared.chunks import geometry_id
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.worker_events import RestorationCosts
from tests.present import present

MHA = KvGeometry(layers=32, kv_heads=32, head_dim=128, page_size=16, dtype="float16")
GQA = structs.replace(MHA, kv_heads=8)
FAST = RestorationCosts(hidden=4096, hidden_us=0.2, token_us=2.0, pair_us=0.0, link_bytes_per_us=20_000.0)


def cell(
    geometry: KvGeometry = MHA,
    costs: RestorationCosts | None = FAST,
    *,
    form: str = "auto",
    disk_bytes_per_s: float = 4e9,
) -> tuple[CellState, Storage]:
    """A state with one worker and one storage on its node."""
    state = new_state()
    state.geometry = geometry
    state.config = structs.replace(state.config, hidden_form=form)
    handle = PoolHandle(kind="shm", layout="layer_first", name="", nbytes=0, pages=1, geometry=geometry)
    state.workers["w"] = Worker("w", "one", "node", handle, 1000, new_pool(1), restoration=costs)
    storage = Storage(
        "s", "one", "node", 0, disk=DiskTier(budget_bytes=1), fetching=Fetching(disk_bytes_per_s=disk_bytes_per_s)
    )
    state.storages["s"] = storage
    return state, storage


@pytest.mark.parametrize("text", ["", "on", "1/2", "1/2/3/4", "-1/2/3", "a/b/c", "1/2/3 ", "12345/0/0"])
def test_a_form_is_off_or_auto_or_three_numbers(text: str) -> None:
    """Anything else is refused with what may stand there."""
    with pytest.raises(ConfigError, match="off, auto"):
        parse_form(text)


def test_forms_are_read() -> None:
    """Layers absent, from hidden states, as KV."""
    assert [parse_form(text) for text in ("off", "auto", "8/24/0")] == [None, None, (8, 24, 0)]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("off", None),
        ("4/20/8", (4096, 4, 20)),
        ("0/32/0", (4096, 0, 32)),
        ("8/0/24", (0, 8, 0)),
        ("0/0/32", None),  # Plain KV.
        ("32/0/0", None),  # Nothing is kept.
        ("4/20/9", None),  # Of another model.
    ],
)
def test_an_explicit_form_is_taken_where_it_adds_up(form: str, expected: tuple[int, int, int] | None) -> None:
    """Whatever it costs."""
    found = wanted_hidden(*cell(form=form))

    assert (found and (found.hidden, found.absent, found.from_hidden)) == expected


@pytest.mark.parametrize(
    ("form", "geometry", "hidden", "fault"),
    [
        ("off", MHA, 0, ""),
        ("auto", MHA, 0, ""),
        ("0/0/32", GQA, 0, ""),
        ("8/0/24", GQA, 0, ""),
        ("4/20/8", MHA, 4096, ""),
        ("0/32/0", GQA, 4096, ""),
        ("4/20/9", MHA, 4096, "4/20/9 has 33 layers, and the model has 32"),
        ("0/0/0", MHA, 4096, "0/0/0 has 0 layers, and the model has 32"),
        ("32/0/0", MHA, 4096, "it keeps nothing"),
        ("4/20/8", GQA, 4096, "hidden states are not as wide as K, so one page cannot hold both"),
        ("0/32/0", MHA, 0, "0/32/0 needs hidden states"),
    ],
)
def test_a_form_that_a_model_cannot_have_is_explained(form: str, geometry: KvGeometry, hidden: int, fault: str) -> None:
    """In words for the operator who configured it."""
    found = form_fault(form, geometry, hidden)

    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def test_hidden_states_need_a_worker_that_can_use_them() -> None:
    """Without a profile, or where it says that none can be, only layers from tokens may be left out."""
    cannot = structs.replace(FAST, hidden=0)

    assert wanted_hidden(*cell(costs=None, form="0/32/0")) is None
    assert wanted_hidden(*cell(costs=cannot, form="0/32/0")) is None
    assert present(wanted_hidden(*cell(costs=None, form="8/0/24"))).absent == 8
    assert wanted_hidden(*cell(form="auto", costs=None)) is None


def test_grouped_queries_cannot_mix_both_in_a_page() -> None:
    """A hidden state is wider than K there; alone it may be kept, if somebody insists."""
    assert wanted_hidden(*cell(GQA, form="4/20/8")) is None
    assert present(wanted_hidden(*cell(GQA, form="4/28/0"))).hidden == 4096


def test_auto_balances_disk_and_device() -> None:
    """A hidden state has half the bytes of KV: on a slow disk all layers are kept so, the first not at all."""
    found = wanted_hidden(*cell(disk_bytes_per_s=4e9))

    assert found is not None
    assert found.is_hidden
    assert found.fault() == ""
    assert found.from_hidden > found.loaded_layers == 0
    assert found.absent > 0


def test_layers_that_long_prefixes_would_compute_too_slowly_are_kept() -> None:
    """Where attention dominates, fewer layers are left to tokens, so that no length that is compared takes longer than
    with the best single method.
    """
    costs = structs.replace(FAST, token_us=1.0, pair_us=1e-3)

    plain, steep = wanted_hidden(*cell()), wanted_hidden(*cell(costs=costs))

    assert steep is not None
    assert steep.absent < present(plain).absent
    layer = LayerCosts(layers=32, kv_bytes=16_384, hidden_bytes=8192, hidden_us=0.2, token_us=1.0, pair_us=1e-3)
    for tokens in COMPARED_TOKENS:
        times = layer_times(layer, tokens, 4000.0)
        assert steep is not None
        taken = made(times, tokens=steep.absent, hidden=steep.from_hidden, kv=steep.loaded_layers, ends_early=True)
        singles = [one(32, times).time_us for one in (kv_only, hidden_only, tokens_only)]
        assert min(taken.time_us, singles[-1]) <= min(singles)


def test_auto_keeps_kv_where_the_disk_is_the_faster_side() -> None:
    """Reading KV hides behind nothing there."""
    assert wanted_hidden(*cell(disk_bytes_per_s=1e12)) is None


def test_auto_keeps_nothing_that_is_computed_sooner() -> None:
    """A disk that is slower than computing is no place for a copy in any form but KV, which others decide."""
    assert (
        wanted_hidden(*cell(costs=structs.replace(FAST, token_us=0.001, hidden_us=0.001), disk_bytes_per_s=1e6)) is None
    )


def test_auto_leaves_first_layers_out_under_grouped_queries() -> None:
    """No hidden states there: fewer layers of KV, and the rest from tokens."""
    found = wanted_hidden(*cell(GQA, disk_bytes_per_s=1e9))

    assert found is not None
    assert (found.hidden, found.from_hidden) == (0, 0)
    assert 0 < found.absent < 32


def test_where_a_page_cannot_hold_both_the_best_of_one_kind_is_taken() -> None:
    """Heads whose K is wider than the hidden state: a mix would be fastest, and there is no page for it."""
    wide = structs.replace(MHA, kv_heads=16, head_dim=256)
    narrow = structs.replace(FAST, hidden=3072, hidden_us=2.8, token_us=50.0)
    rate = 5e9
    fits = wanted_hidden(*cell(MHA, structs.replace(narrow, hidden=4096), disk_bytes_per_s=rate))
    assert fits is not None
    assert min(fits.from_hidden, fits.loaded_layers) > 0

    found = wanted_hidden(*cell(wide, narrow, disk_bytes_per_s=rate))

    assert found is not None
    assert found.fault() == ""
    assert found.from_hidden == 32 - found.absent


@pytest.mark.parametrize("disk_bytes_per_s", [2e9, 4e9, 5e9, 8e9, 1e12])
@pytest.mark.parametrize("factor", [0.1, 0.92, 1.0, 1.04, 1.08, 10.0])
def test_what_is_observed_under_load_moves_no_form(disk_bytes_per_s: float, factor: float) -> None:
    """The form follows from what was measured before anything was served: chunks of another form are never found, so a
    worker that computes 8 % more slowly for an hour must not change it.
    """
    state, storage = cell(disk_bytes_per_s=disk_bytes_per_s)
    expected, is_worth_it = wanted_hidden(state, storage), is_worth_keeping(state, storage)

    for _ in range(20):
        state.workers["w"].speed.note_compute(1000, 0, int(1000 * FAST.token_us * MHA.layers * factor))
        storage.fetching.disk_rate.note(disk_bytes_per_s / factor, 1e6)

    assert wanted_hidden(state, storage) == expected
    assert is_worth_keeping(state, storage) is is_worth_it


def test_no_form_is_chosen_before_the_disk_was_measured() -> None:
    """A guess would stay for the life of the storage. What fetches find is a measurement, too, where there is none."""
    state, storage = cell(disk_bytes_per_s=0.0)
    assert wanted_hidden(state, storage) is None

    storage.fetching.disk_rate.note(4e9, 1e6)

    assert present(wanted_hidden(state, storage)).form == present(wanted_hidden(*cell(disk_bytes_per_s=4e9))).form


def test_a_limit_counts_where_it_is_below_what_was_measured() -> None:
    """Reads begin no faster than the limit; without one the measured speed counts."""
    found = []
    for measured, limit in ((2e9, 8e9), (8e9, 2e9), (2e9, 0.0)):
        state, storage = cell(disk_bytes_per_s=limit)
        storage.fetching.measured_bytes_per_s = measured
        found.append(present(wanted_hidden(state, storage)).form)

    assert found == [present(wanted_hidden(*cell(disk_bytes_per_s=2e9))).form] * 3


def test_a_disk_that_holds_a_form_keeps_it() -> None:
    """Whatever would be chosen now: of several that with most chunks, of those that can be restored here."""
    foreign = structs.replace(MHA, layers=16, hidden=4096, from_hidden=16)
    wide = structs.replace(MHA, hidden=2048, from_hidden=32)
    kept, less = structs.replace(MHA, hidden=4096, absent=3, from_hidden=29), structs.replace(MHA, absent=1)
    state, storage = cell()
    assert wanted_hidden(state, storage) != kept

    storage.hidden.shapes = b"".join(map(geometry_id, (MHA, foreign, wide, kept, less)))

    assert wanted_hidden(state, storage) == kept
    state.config = structs.replace(state.config, hidden_form="0/32/0")
    assert present(wanted_hidden(state, storage)).form == "0/32/0"


@pytest.mark.parametrize(("form", "is_worth_it"), [((16, 16), True), ((0, 32), True), ((1, 0), False)])
def test_a_form_that_a_disk_holds_is_saved_in_where_it_pays(form: tuple[int, int], is_worth_it: bool) -> None:
    """One that comes back hardly sooner than KV is read, and what is new is saved as KV."""
    kept = structs.replace(MHA, hidden=4096 if form[1] else 0, absent=form[0], from_hidden=form[1])
    state, storage = cell()
    storage.hidden.shapes = geometry_id(kept)
    storage.hidden.handle = PoolHandle(kind="shm", layout="page_first", name="", nbytes=0, pages=1, geometry=kept)

    assert wanted_hidden(state, storage) == kept
    assert is_worth_keeping(state, storage) is is_worth_it


def test_a_disk_that_keeps_sparse_copies_keeps_kv() -> None:
    """Sparse copies are made of KV: hidden states in its place would switch reading in part off, in silence."""
    state, storage = cell()
    assert wanted_hidden(state, storage) is not None
    assert is_worth_keeping(state, storage)

    storage.sparse.is_kept = True

    assert wanted_hidden(state, storage) is None
    assert not is_worth_keeping(state, storage)


def test_hidden_states_that_such_a_disk_held_before_are_still_read() -> None:
    """What is computed now is saved as KV beside them."""
    state, storage = cell()
    storage.hidden.shapes = geometry_id(present(wanted_hidden(state, storage)))
    storage.sparse.is_kept = True

    assert wanted_hidden(state, storage) is not None
    assert not is_worth_keeping(state, storage)


def test_only_auto_asks_whether_it_is_worth_it() -> None:
    """An explicit form always is, off never."""
    for form, expected in (("off", False), ("4/20/8", True), ("auto", False)):
        assert is_worth_keeping(*cell(form=form, disk_bytes_per_s=1e12)) is expected


def test_who_can_restore() -> None:
    """Any worker from KV alone; from hidden states those of the same width."""
    state, _ = cell()
    worker = state.workers["w"]
    hidden, alone = structs.replace(MHA, hidden=4096, from_hidden=32), structs.replace(MHA, absent=8)

    assert can_restore(worker, hidden)
    assert not can_restore(worker, structs.replace(hidden, hidden=2048))
    worker.restoration = None
    assert not can_restore(worker, hidden)
    assert can_restore(worker, alone)
