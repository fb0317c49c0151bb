"""Workloads: the averages of the papers, the sharing that they promise, and the same requests for the same seed."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from shared.errors import InvalidRequest
from thermocline.simulate.workloads import WORKLOADS, Asked, TraceWorkload, make_workload
from thermocline.simulate.workloads.agents import AgentOptions, AgentWorkload
from thermocline.simulate.workloads.chat import ChatOptions, ChatWorkload
from thermocline.simulate.workloads.diurnal import DiurnalOptions, DiurnalWorkload
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload
from thermocline.simulate.workloads.drift import DriftOptions, DriftWorkload
from thermocline.simulate.workloads.few_shot import FewShotOptions, FewShotWorkload
from thermocline.simulate.workloads.lengths import shares
from thermocline.simulate.workloads.scans import ScanOptions, ScanWorkload
from thermocline.trace import arrival_order


@pytest.mark.parametrize(
    ("dataset", "questions", "subjects", "prompt_tokens"),
    [("mmlu", 14_042, 57, 567), ("bbh", 6_511, 27, 723), ("ceval", 12_342, 52, 1_673), ("hellaswag", 10_042, 192, 753)],
)
def test_few_shot_sets_have_the_paper_s_lengths(
    dataset: str, questions: int, subjects: int, prompt_tokens: int
) -> None:
    """Numbers of questions and subjects and the average prompt are as published (HotPrefix 5.1), within 2%."""
    asked = list(FewShotWorkload(FewShotOptions(dataset=dataset), seed=1).requests())  # type: ignore[arg-type]

    assert len(asked) == questions
    assert len({each.spans[0] for each in asked}) == subjects
    assert fmean(each.prompt_tokens for each in asked) == pytest.approx(prompt_tokens, rel=0.02)


def test_few_shot_questions_are_shuffled_and_their_own() -> None:
    """Neighbours are seldom of one subject, and no two questions share their last span."""
    asked = list(FewShotWorkload(FewShotOptions(questions=2000), seed=1).requests())
    same = sum(left.spans[0] == right.spans[0] for left, right in itertools.pairwise(asked))

    assert same < 200
    assert len({each.spans[1].name for each in asked}) == 2000
    assert len({each.answer.name for each in asked}) == 2000


@pytest.mark.parametrize(
    ("dataset", "contexts", "queries", "prompt_tokens", "answer_tokens"),
    [
        ("loogle", 105, 2_410, 21_613, 15.6),
        ("narrativeqa", 50, 1_461, 54_797, 13),
        ("reviewmt", 100, 1_092, 17_708, 208.3),
    ],
)
def test_document_sets_have_the_paper_s_numbers(
    dataset: str, contexts: int, queries: int, prompt_tokens: int, answer_tokens: float
) -> None:
    """Contexts, queries and average lengths are those of Strata's Table 1, within 2%."""
    asked = list(DocumentWorkload(DocumentOptions(dataset=dataset), seed=1).requests())  # type: ignore[arg-type]

    assert len(asked) == queries
    assert len({each.spans[0] for each in asked}) == contexts
    assert fmean(each.prompt_tokens for each in asked) == pytest.approx(prompt_tokens, rel=0.02)
    assert fmean(each.answer.tokens for each in asked) == pytest.approx(answer_tokens, rel=0.02)


def _distances(distance: str) -> list[int]:
    """How many queries lie between two of the same context."""
    options = DocumentOptions(distance=distance, contexts=20, queries=400)  # type: ignore[arg-type]
    last: dict[int, int] = {}
    found = []
    for place, asked in enumerate(DocumentWorkload(options, seed=2).requests()):
        document = asked.spans[0].name
        if document in last:
            found.append(place - last[document])
        last[document] = place
    return found


def test_cache_distances_are_what_they_are_called() -> None:
    """Minimal: all queries of a context in a row. Maximal: always all other contexts between. Shuffled: between."""
    assert set(_distances("min")) == {1}
    assert set(_distances("max")) == {20}
    assert 1 < fmean(_distances("shuffled")) < 20.5
    assert len(set(_distances("shuffled"))) > 20


def _conversation(workload: ChatWorkload | AgentWorkload, first: Asked) -> list[tuple[float, Asked]]:
    turns = [(0.0, first)]
    while (following := workload.follow_up(turns[-1][1])) is not None:
        turns.append(following)
    return turns


def test_a_turn_repeats_all_that_was_said() -> None:
    """Each prompt begins with the prompt and the answer before it, and a user thinks for a while."""
    workload = ChatWorkload(ChatOptions(sessions=50, turns=6), seed=3)
    talks = [_conversation(workload, first) for first in workload.requests()]

    assert max(len(talk) for talk in talks) > 3
    for talk in talks:
        for (_, before), (pause_s, after) in itertools.pairwise(talk):
            said = (*before.spans, before.answer)
            assert after.spans[: len(said)] == said
            assert len(after.spans) == len(said) + 1
            assert pause_s > 0


def test_chat_has_sharegpt_s_averages() -> None:
    """About 681 tokens in, 261 out and 60 s of thinking on average (Strata, Table 1 and 5.1)."""
    workload = ChatWorkload(ChatOptions(sessions=6000), seed=1)
    turns = [turn for first in workload.requests() for turn in _conversation(workload, first)]

    assert fmean(asked.prompt_tokens for _, asked in turns) == pytest.approx(681, rel=0.06)
    assert fmean(asked.answer.tokens for _, asked in turns) == pytest.approx(261, rel=0.03)
    assert fmean(pause_s for pause_s, _ in turns if pause_s) == pytest.approx(60, rel=0.03)


def test_follow_ups_do_not_depend_on_when_answers_come() -> None:
    """A conversation is the same whether it is asked about at once or after all others."""
    eager, late = ChatWorkload(ChatOptions(sessions=30), seed=5), ChatWorkload(ChatOptions(sessions=30), seed=5)
    firsts = list(late.requests())

    assert [_conversation(eager, first) for first in eager.requests()] == [
        _conversation(late, first) for first in reversed(firsts)
    ][::-1]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_seed_decides_everything(name: str) -> None:
    """The same seed gives the same requests, another seed others."""

    def first(seed: int) -> list[Asked]:
        options: msgspec.Struct = WORKLOADS[name][0]()
        return list(itertools.islice(make_workload(name, options, seed).requests(), 100))

    assert first(1) == first(1)
    assert first(1) != first(2)


OPEN_LOOP = ("diurnal", "drift", "retrieval", "scans", "shot-tree", "tenants")


@pytest.mark.parametrize("name", OPEN_LOOP)
def test_one_off_requests_come_at_times_of_their_own_and_end(name: str) -> None:
    """As many as were asked for, in order of time, each with a question and an answer of its own."""
    requests = list(make_workload(name, WORKLOADS[name][0](queries=300), 3).requests())
    times = [request.time_s or 0.0 for request in requests]

    assert len(requests) == 300
    assert times == sorted(times)
    assert len({request.spans[-1].name for request in requests}) == 300
    assert len({request.answer.name for request in requests}) == 300


@pytest.mark.parametrize("name", OPEN_LOOP)
def test_a_prefix_is_as_long_whenever_it_is_asked_for(name: str) -> None:
    """Spans of one name have one length, so that they are one prefix; some are asked for again."""
    lengths: dict[int, int] = {}
    asked = [span for each in make_workload(name, WORKLOADS[name][0](), 3).requests() for span in each.spans[:-1]]
    for span in asked:
        assert lengths.setdefault(span.name, span.tokens) == span.tokens

    assert len(lengths) < len(asked) / 2


def test_a_job_scans_each_document_once_unless_it_repeats() -> None:
    """Popular prompts are asked between the runs; documents of a run are new ones, or those of the run before."""
    for repeats, again in ((False, False), (True, True)):
        options = ScanOptions(queries=60, prompts=5, scan_length=10, pause_length=20, repeats=repeats)
        names = [request.spans[0].name for request in ScanWorkload(options, 1).requests()]

        assert len(set(names[20:30])) == len(set(names[50:60])) == 10
        assert (names[20:30] == names[50:60]) is again
        assert len({*names[:20], *names[30:50]}) <= 5


def test_fashions_change_only_as_fast_as_they_are_told() -> None:
    """With one replacement a request no prefix stays; with hardly any the same few do."""
    for replaced, least, most in ((1e-9, 1, 10), (1.0, 200, 400)):
        options = DriftOptions(queries=400, prefixes=10, exponent=0.5, replaced=replaced)
        names = {request.spans[0].name for request in DriftWorkload(options, 1).requests()}

        assert least <= len(names) <= most


def test_the_night_s_job_takes_its_prompts_in_turn() -> None:
    """Whatever is asked between them, they follow one another around."""
    options = DiurnalOptions(queries=500, night_prompts=7, day_prompts=50)
    numbers = [request.spans[0].name // 3 for request in DiurnalWorkload(options, 1).requests()]
    turns = [number - (1 << 24) for number in numbers if number >= 1 << 24]

    assert len(turns) > 100
    assert turns == [place % 7 for place in range(len(turns))]


def test_an_agent_builds_on_what_it_did_or_goes_back_by_one_step() -> None:
    """Each step repeats all that was said before, or all of it up to the last result but one."""
    workload = AgentWorkload(AgentOptions(sessions=60, steps=10, failing=0.2), 1)
    kept = gone = 0
    for first in workload.requests():
        for (_, before), (_, after) in itertools.pairwise(_conversation(workload, first)):
            if after.spans[:-1] == (*before.spans, before.answer):
                kept += 1
            else:
                assert after.spans[:-1] == before.spans[:-2]
                gone += 1

    assert 0.1 < gone / (kept + gone) < 0.25


def test_shares_add_up() -> None:
    """Things divided in proportion are all given away, whatever the rounding."""
    for total in (0, 1, 10, 997):
        assert sum(shares(total, [0.3, 0.1, 5, 2.2])) == total


def _write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _line(timestamp: int, length: int, hash_ids: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 5, "hash_ids": hash_ids}


def test_a_trace_shares_blocks_by_name_and_keeps_its_times(tmp_path: Path) -> None:
    """Equal hash ids are equal spans, the last one is cut to the length, and what no block covers is its own."""
    path = _write(tmp_path / "trace", _line(0, 600, [1, 2]), _line(3000, 600, [1]), _line(2000, 700, [1, 2]))
    first, second, third = TraceWorkload(path, speed=2).requests()

    assert [span.tokens for span in first.spans] == [512, 88]
    assert first.spans[0] == second.spans[0] == third.spans[0]
    assert first.spans[1].name == second.spans[1].name != third.spans[1].name
    assert [each.time_s for each in (first, second, third)] == [0.0, 1.0, 1.5]


def test_the_times_of_a_trace_count_from_its_first_request(tmp_path: Path) -> None:
    """Also where they are milliseconds since 1970, to the millisecond."""
    epoch_ms = 1_732_900_000_000
    path = _write(tmp_path / "trace", *(_line(epoch_ms + after_ms, 600, [1, 2]) for after_ms in (123, 124, 1123)))

    assert [each.time_s for each in TraceWorkload(path).requests()] == [0.0, 0.001, 1.0]


def test_a_trace_is_streamed_up_to_its_malformed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes more than the window before a bad line is asked; then the line is named."""
    monkeypatch.setattr(arrival_order, "HELD_REQUESTS", 1)
    path = _write(tmp_path / "trace", _line(0, 600, [1, 2]), _line(1, 700, [1, 2]), '{"timestamp": 1')
    requests = TraceWorkload(path).requests()

    assert next(requests).prompt_tokens == 600
    with pytest.raises(InvalidRequest, match=r"trace:3:"):
        next(requests)


def test_names_of_different_kinds_of_spans_never_meet() -> None:
    """In a whole workload, examples, questions and answers have names of their own."""
    asked = list(FewShotWorkload(FewShotOptions(questions=500), seed=1).requests())
    kinds = Counter(
        name
        for names in (
            {each.spans[0].name for each in asked},
            {each.spans[1].name for each in asked},
            {each.answer.name for each in asked},
        )
        for name in names
    )

    assert set(kinds.values()) == {1}
