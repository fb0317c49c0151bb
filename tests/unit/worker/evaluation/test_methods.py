"""Which tokens each method keeps."""

from __future__ import annotations

import pytest
import torch

from services.worker.evaluation.methods import METHODS, Full, Method, MethodSettings
from services.worker.evaluation.selection import Chosen, LayerView
from shared.errors import ConfigError, InvalidRequest
from tests.unit.worker.evaluation.views import attending_to, random_view, view_of

SETTINGS = MethodSettings()


def choose(name: str, ratio: float, view: LayerView, settings: MethodSettings = SETTINGS) -> list[Chosen]:
    method = Method.named(name)
    recorder = method.recorder() if method.needs_record else None
    if recorder is not None:
        recorder.choose(view)
    return method.at(ratio, settings, recorder).choose(view)


def kept(chosen: Chosen) -> list[list[int]]:
    assert chosen.tokens is not None
    rows: list[list[int]] = chosen.tokens.tolist()
    return rows


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1, 0.01])
def test_every_method_keeps_its_budget(name: str, ratio: float) -> None:
    """All keep equally many tokens, ascending and without repeats, and never more KV is read than there is twice."""
    chosen = choose(name, ratio, random_view(4))

    for one in chosen:
        for row in kept(one):
            assert len(row) == max(1, round(40 * ratio))
            assert row == sorted(set(row))
        assert ratio <= one.read + 1e-9 <= 2


@pytest.mark.parametrize("name", METHODS)
def test_every_method_repeats_itself(name: str) -> None:
    """The same view gives the same tokens."""
    first, again = (choose(name, 0.3, random_view(4)) for _ in range(2))

    assert [kept(one) for one in first] == [kept(one) for one in again]


def test_all_of_the_prefix_is_not_a_selection() -> None:
    """``Full`` keeps everything, and reads it once."""
    chosen = Full().choose(random_view(2))

    assert [(one.tokens, one.read) for one in chosen] == [(None, 1.0)] * 2


def test_h2o_lets_every_head_choose() -> None:
    """Each head keeps what it attends to, after all keys were read."""
    (chosen,) = choose("h2o", 0.1, view_of([attending_to([3, 7], [11, 5], [3, 5], [0, 1])]))

    assert kept(chosen) == [[3, 7], [5, 11], [3, 5], [0, 1]]
    assert chosen.read == pytest.approx((1 + 0.1) / 2)


def test_probe_heads_that_agree_speak_for_all() -> None:
    """Their votes win over what another head attends to, and only their keys were read beside the chosen KV."""
    view = view_of([attending_to([3, 7], [7, 3], [3, 7], [0, 1])])

    (chosen,) = choose("importance", 0.1, view)

    assert kept(chosen) == [[3, 7]]
    assert chosen.read == pytest.approx(3 / 8 + 0.1)
    assert not chosen.fell_back


def test_probe_heads_that_disagree_decide_nothing() -> None:
    """The layer does what H2O does, and says so."""
    view = view_of([attending_to([3, 7], [11, 5], [9, 2], [0, 1])])

    (chosen,), (everyone,) = choose("importance", 0.1, view), choose("h2o", 0.1, view)

    assert kept(chosen) == kept(everyone)
    assert (chosen.read, chosen.fell_back) == (everyone.read, True)


def test_a_threshold_of_nothing_accepts_any_similarity() -> None:
    """With a large exponent the slightest overlap is enough, and votes decide."""
    view = view_of([attending_to([3, 7], [3, 5], [9, 2], [0, 1])])

    (chosen,) = choose("importance", 0.1, view, MethodSettings(alpha=9.0))

    assert 3 in kept(chosen)[0]
    assert not chosen.fell_back


def test_the_metric_is_part_of_the_name() -> None:
    """``last`` looks at the question's last token only."""
    weights = torch.zeros(1, 2, 20)
    weights[0, 0, 4], weights[0, 1, 9] = 0.9, 0.5

    by_sum, by_last = (choose(name, 0.05, view_of([weights])) for name in ("h2o", "h2o:last"))

    assert (kept(by_sum[0]), kept(by_last[0])) == ([[4]], [[9]])


def test_static_learns_from_other_questions_alone() -> None:
    """Even questions get what odd ones attended to, and the other way round."""
    view = view_of([attending_to([3, 7]), attending_to([11, 5]), attending_to([3, 7]), attending_to([11, 5])])

    chosen = choose("static", 0.1, view)

    assert [kept(one) for one in chosen] == [[[5, 11]], [[3, 7]], [[5, 11]], [[3, 7]]]


def test_static_needs_another_question() -> None:
    """A single question has nothing to learn from."""
    with pytest.raises(InvalidRequest, match="two questions"):
        choose("static", 0.5, random_view(1))


def test_static_needs_a_record() -> None:
    """Nobody can choose from a record that was not made."""
    with pytest.raises(ConfigError, match="record"):
        Method.named("static").at(0.5, SETTINGS)


def test_random_tokens_do_not_depend_on_the_batch() -> None:
    """A question draws the same tokens alone as among others, and others than its neighbour or another layer."""
    together = choose("random", 0.3, random_view(3))
    alone = choose("random", 0.3, view_of(random_view(1).weights, first=2))
    deeper = choose("random", 0.3, random_view(3, layer=1))
    reseeded = choose("random", 0.3, random_view(3), MethodSettings(seed=1))

    assert kept(together[2]) == kept(alone[0])
    assert len({str(kept(one[2])) for one in (together, deeper, reseeded)} | {str(kept(together[1]))}) == 4


def test_any_seed_will_do() -> None:
    """However large, or negative."""
    for seed in (-1, 2**80):
        assert len(kept(choose("random", 0.3, random_view(1), MethodSettings(seed=seed))[0])[0]) == 12


def test_recent_keeps_both_ends() -> None:
    """The first four tokens and the last ones; of a tiny budget half are first ones."""
    (chosen,), (tiny,) = (choose("recent", ratio, random_view(1, tokens=20)) for ratio in (0.5, 0.1))

    assert kept(chosen) == [[0, 1, 2, 3, 14, 15, 16, 17, 18, 19]]
    assert kept(tiny) == [[0, 19]]


@pytest.mark.parametrize("name", ["importance", "h2o", "static", "random"])
def test_tokens_that_are_always_kept_count_towards_the_budget(name: str) -> None:
    """First and recent tokens are in every set, which is no larger for it."""
    chosen = choose(name, 0.25, random_view(2), MethodSettings(first_tokens=2, recent_tokens=3))

    for one in chosen:
        for row in kept(one):
            assert len(row) == 10
            assert {0, 1, 37, 38, 39} <= set(row)


@pytest.mark.parametrize("name", ["best", "importance:best"])
def test_unknown_names_are_refused(name: str) -> None:
    """The message says what there is."""
    with pytest.raises(ConfigError, match=r"there is no .*'best'; there are"):
        Method.named(name)
