"""Comparing with peers: what is asked."""

from collections import Counter

from bench.peers.asking import prompt_seed
from bench.peers.passes import PASSES, DocumentQuestions, Pass, documents_passes
from bench.peers.rounds import seed_of, turned
from thermocline.simulate.workloads import Asked


def asked_of(made: Pass) -> list[Asked]:
    return list(made.workload.requests())


def test_passes_ask_other_questions_about_the_same_documents() -> None:
    """So that a document is found, and no question is."""
    cold, host, disk = (asked_of(made) for made in documents_passes(1, 1.0))

    documents = [{asked.spans[0].name for asked in each} for each in (cold, host, disk)]
    questions = [asked.spans[1].name for each in (cold, host, disk) for asked in each]
    assert documents[0] == documents[1] == documents[2]
    assert len(questions) == len(set(questions)) == 3 * 64
    assert {asked.prompt_tokens for asked in cold} == {2048 + 32}


def test_every_document_is_asked_about_equally_often_in_an_order_of_the_seed() -> None:
    """The order of another pass or seed is another, that of the same is the same."""
    order = [asked.spans[0].name for asked in DocumentQuestions(8, 4, number=0, seed=1).requests()]
    again = [asked.spans[0].name for asked in DocumentQuestions(8, 4, number=0, seed=1).requests()]
    other = [asked.spans[0].name for asked in DocumentQuestions(8, 4, number=0, seed=2).requests()]

    assert set(Counter(order).values()) == {4}
    assert order == again
    assert order != other


def test_the_first_question_on_each_document_is_known() -> None:
    """By its number, which is its place in the order."""
    workload = DocumentQuestions(5, 3, number=0, seed=3)
    seen: set[int] = set()
    firsts = set()
    for number, asked in enumerate(workload.requests()):
        if asked.spans[0].name not in seen:
            firsts.add(number)
        seen.add(asked.spans[0].name)

    assert workload.firsts() == firsts
    assert len(firsts) == 5


def test_prompts_of_a_round_are_shared_only_where_they_are_meant_to_be() -> None:
    """Documents in all passes of their workload, nothing between bursts, sizes or rounds."""
    assert len({prompt_seed(7, made) for made in PASSES["documents"](7, 1.0)}) == 1
    for workload in ("burst", "unshared"):
        passes = PASSES[workload](7, 1.0)
        assert len({prompt_seed(7, made) for made in passes}) == len(passes)
    assert prompt_seed(8, PASSES["burst"](8, 1.0)[0]) > prompt_seed(7, PASSES["burst"](7, 1.0)[-1])


def test_a_burst_asks_about_one_document_of_the_length_that_its_pass_is_named_after() -> None:
    """Eight at once, each with a question of its own."""
    lengths = {}
    for made in PASSES["burst"](7, 1.0):
        asked = asked_of(made)
        assert len(asked) == made.places == 8
        assert len({each.spans[0].name for each in asked}) == 1
        assert len({each.spans[1].name for each in asked}) == 8
        lengths[made.name] = {each.spans[0].tokens for each in asked}

    assert lengths == {"burst": {2048}, "burst_1024": {1024}, "burst_512": {512}}


def test_no_workload_or_round_asks_for_what_another_left_on_a_disk() -> None:
    """Every pass of every round has prompts of its own, but for those on the same documents."""
    seeds = []
    for workload, make in PASSES.items():
        for number in range(5):
            seed = seed_of(workload, 1, number)
            seeds += list(dict.fromkeys(prompt_seed(seed, made) for made in make(seed, 1.0)))

    assert len(seeds) == len(set(seeds))
    assert seed_of("warm-up", 1, 0) not in {seed_of(workload, 1, 0) for workload in PASSES}


def test_every_workload_can_be_tried_with_a_small_share() -> None:
    """With requests left, and fewer than in full."""
    for make in PASSES.values():
        full, small = make(1, 1.0), make(1, 0.01)
        assert 0 < sum(made.requests for made in small) < sum(made.requests for made in full)


def test_only_the_passes_from_below_need_a_tier() -> None:
    """And only the one from the disk empties what is above it."""
    needs = {made.name: (made.needs, made.emptied) for made in documents_passes(1, 1.0)}
    assert needs == {"cold": (None, ()), "host": ("host", ()), "disk": ("disk", ("device", "host"))}


def test_conversations_do_not_fit_the_device_together() -> None:
    """Sixteen of them, each up to its bound."""
    (chat,) = PASSES["chat"](1, 1.0)
    assert len(asked_of(chat)) == chat.places == 16


def test_another_system_goes_first_in_each_round() -> None:
    """And the order is kept otherwise."""
    assert [turned(["a", "b", "c"], number) for number in (0, 1, 3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["a", "b", "c"],
    ]


def test_agents_sessions_grow_turn_by_turn_to_eight_thousand_tokens() -> None:
    """Each turn repeats what was said before it, and all sessions begin with the same instructions."""
    (made,) = PASSES["agents"](7, 1.0)
    firsts = asked_of(made)
    lengths, asked = [firsts[3].prompt_tokens], firsts[3]
    while (following := made.workload.follow_up(asked)) is not None:
        _, later = following
        assert later.spans[: len(asked.spans) + 1] == (*asked.spans, asked.answer)
        asked = later
        lengths.append(asked.prompt_tokens)

    assert len(firsts) * len(lengths) == made.requests == 14 * 40
    assert len({each.spans[0] for each in firsts}) == 1
    assert len({each.spans[1].name for each in firsts}) == 14
    assert 7_000 < lengths[-1] < 8_704
