"""The benches of HotPrefix's switches: what is asked, in which order, and what becomes of counts."""

import pytest

from bench.held_out import HELD_OUT_FAMILIES
from bench.hotness_live import ARRANGEMENTS, DEVELOPED_WITH, MOST_TOKENS, Turn, figures, in_order, requests_of
from bench.hotness_switches import SWITCHES, generated
from shared.messages.cell_events import CellConfig
from thermocline.simulate.workloads import Asked
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload


@pytest.mark.parametrize("name", [*DEVELOPED_WITH, *HELD_OUT_FAMILIES])
def test_every_cell_is_asked_the_same_requests_and_can_hold_them(name: str) -> None:
    """They follow from the seed alone; what is longer than the model's context is left out."""
    asked = requests_of(name, seed=1, count=20)

    assert len(asked) == 20
    assert [one.spans for one in asked] == [one.spans for one in requests_of(name, seed=1, count=20)]
    assert max(one.prompt_tokens + one.answer.tokens for one in asked) <= MOST_TOKENS


def test_a_conversation_goes_on_after_its_last_turn() -> None:
    """Each turn's prompt is that of the turn before, its answer and a question; conversations take turns."""
    last: dict[int, Asked] = {}
    followed = []
    for asked in in_order(ChatWorkload(ChatOptions(sessions=6, turns=4.0), seed=2)):
        before = last.get(asked.session.number)
        if before is not None:
            assert asked.spans[:-1] == (*before.spans, before.answer)
            followed.append(asked.session.number)
        last[asked.session.number] = asked

    assert len(last) == 6
    assert followed != sorted(followed)


def turn(ttft_s: float, **counted: int) -> Turn:
    """A turn of 100 prompt tokens."""
    nothing = dict.fromkeys(("hit_device", "hit_host", "computed", "backed_up", "promoted"), 0)
    return Turn(ttft_s, 1.0, 100, nothing | counted)


def test_counts_are_of_all_rounds_and_ratios_of_the_same_round() -> None:
    """A round in which everything was slow says nothing of an arrangement."""
    everything = [turn(1.0, hit_device=40), turn(10.0, hit_device=40), turn(1.0, hit_device=40)]
    own = [turn(2.0, hit_device=50, hit_host=10), turn(20.0, hit_device=30, hit_host=10), turn(2.0, hit_device=40)]
    found = figures(own, everything)

    assert found["hit_ratio"] == pytest.approx(140 / 300)
    assert found["device_hit_ratio"] == pytest.approx(120 / 300)
    assert found["loaded_tokens"] == 20
    assert found["ttft_ratio"]["median"] == pytest.approx(2.0)


def test_a_cell_as_it_is_by_default_is_the_one_that_the_others_are_compared_with() -> None:
    """Its settings are written out, so that another default would not change what was measured."""
    assert CellConfig(**SWITCHES["all"]) == CellConfig()
    assert ARRANGEMENTS["all"] == SWITCHES["all"]


def test_held_out_cases_have_as_much_host_memory_as_device_memory() -> None:
    """Those that are developed with are asked with more, too."""
    assert {case.host_share for case in generated(1, 10, HELD_OUT_FAMILIES, "held-out")} == {1}
    assert {case.host_share for case in generated(1, 10, ("scans",))} == {1, 4}
