"""What clients read: logprobs, usage and timing from what workers said."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.assembly import Delta
from services.gateway.openai_schema.usage import ImportanceReport
from services.gateway.pending import Choice, Generation
from services.gateway.token_text import TokenTexts
from services.gateway.views.answer import Head, Wanted
from services.gateway.views.chat_view import ChatView
from services.gateway.views.completion_view import CompletionView
from services.gateway.views.logprobs import (
    LEAST_LOGPROB,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    prompt_logprob_list,
)
from services.gateway.views.usage import timing_report, usage_report
from shared.messages.tokens import ImportanceUsage, Timing, TokenItem, TokenLogprob, Usage
from shared.messages.worker_events import FinishReason
from tests.scripted_cell import submit
from tests.unit.gateway.running_gateway import tokenizer

TEXTS = tokenizer().texts
HEAD = Head("id-1", 1_700_000_000, "m", "fp_0")
HELLO = tokenizer().encode_now(" the", add_special_tokens=False)[0]


def generation(prompts: int = 1, n: int = 1) -> Generation:
    choices = []
    for position in range(prompts * n):
        request = msgspec.structs.replace(submit(f"r-{position}", [*range(8)]), received_ns=1_000_000)
        choices.append(Choice(request, position, position // n, 0.0))
    return Generation(choices)


def feed(choice: Choice, tokens: int, device: int, host: int) -> None:
    item = TokenItem(
        request_id=choice.request_id,
        attempt=1,
        index=0,
        tokens=(HELLO,) * tokens,
        text=" the" * tokens,
        finish="length",
        usage=Usage(device_tokens=device, host_tokens=host),
    )
    choice.accept("w", item, 1.0)


def test_a_prompt_counts_once_however_many_choices() -> None:
    """Output counts for every choice, cached tokens for the first of each prompt."""
    made = generation(prompts=2, n=2)
    for number, choice in enumerate(made.choices):
        feed(choice, tokens=3, device=number, host=1)
    report = usage_report(made)

    assert (report.prompt_tokens, report.completion_tokens, report.total_tokens) == (16, 12, 28)
    assert report.prompt_tokens_details.device_tokens == 0 + 2
    assert report.prompt_tokens_details.host_tokens == 2
    assert report.prompt_tokens_details.cached_tokens == 4


def test_every_tier_counts_as_cached() -> None:
    """Those from disk, object store, a neighbour's device, hidden states and in part are told apart and are all
    cached ones.
    """
    made = generation(prompts=1, n=1)
    usage = Usage(
        device_tokens=1, host_tokens=2, disk_tokens=3, remote_tokens=4, neighbour_tokens=5, hidden_tokens=6,
        sparse_tokens=7,
    )  # fmt: skip
    item = TokenItem(request_id=made.choices[0].request_id, attempt=1, index=0, tokens=(HELLO,), usage=usage)
    made.choices[0].accept("w", item, 1.0)

    details = usage_report(made).prompt_tokens_details

    assert (details.disk_tokens, details.remote_tokens, details.neighbour_tokens) == (3, 4, 5)
    assert (details.hidden_tokens, details.sparse_tokens) == (6, 7)
    assert details.cached_tokens == 28


def feed_lossy(choice: Choice, loaded: int) -> None:
    importance = ImportanceUsage(
        ratio=0.25, metric="last_pooled", loaded_tokens=loaded, layers=6, layers_fallen_back=1, disk_bytes=1000
    )
    usage = Usage(device_tokens=1, sparse_tokens=4 * loaded, importance=importance)
    item = TokenItem(
        request_id=choice.request_id, attempt=1, index=0, tokens=(HELLO,), text=" the", finish="length", usage=usage
    )
    choice.accept("w", item, 1.0)


def test_an_exact_answer_has_no_importance() -> None:
    """Null, not zeros: nothing was lossy."""
    made = generation()
    feed(made.choices[0], tokens=1, device=4, host=0)

    assert usage_report(made).importance is None


def test_what_was_loaded_is_summed_over_choices() -> None:
    """Each choice chose and read by itself, the exact ones nothing; cached tokens stay those of the first choice."""
    made = generation(n=3)
    feed_lossy(made.choices[0], loaded=1)
    feed(made.choices[1], tokens=1, device=5, host=0)
    feed_lossy(made.choices[2], loaded=2)
    report = usage_report(made)

    assert report.importance == ImportanceReport(
        ratio=0.25,
        metric="last_pooled",
        loaded_tokens=3,
        prefix_tokens=12,
        layers=12,
        layers_fallen_back=2,
        disk_bytes=2000,
    )
    assert (report.prompt_tokens_details.sparse_tokens, report.prompt_tokens_details.cached_tokens) == (4, 5)


def test_a_lossy_choice_behind_an_exact_one_is_told() -> None:
    """Its prompt was found elsewhere in the meantime, or not any more; the answer as a whole is not exact."""
    made = generation(n=2)
    feed(made.choices[0], tokens=1, device=5, host=0)
    feed_lossy(made.choices[1], loaded=2)
    report = usage_report(made)

    assert report.prompt_tokens_details.sparse_tokens == 0
    assert report.importance is not None
    assert report.importance.prefix_tokens == 8


@pytest.mark.parametrize("view_of", [ChatView, CompletionView])
def test_importance_is_in_whole_answers_and_in_the_usage_chunk(view_of: type[ChatView | CompletionView]) -> None:
    """Both endpoints, streaming or not."""
    made = generation()
    feed_lossy(made.choices[0], loaded=2)
    view = view_of(made, HEAD, Wanted(usage_chunk=True), TEXTS, lambda: 0)
    usages = [msgspec.json.decode(body)["usage"] for body in (*view.closing(), view.whole())]

    assert [usage["importance"]["loaded_tokens"] for usage in usages] == [2, 2]


def test_usage_is_zero_before_the_first_token() -> None:
    """Nothing is invented."""
    assert usage_report(generation()).prompt_tokens_details.cached_tokens == 0


def test_timing_adds_up_to_the_first_token() -> None:
    """Accept, admit, queue, load and compute are its parts."""
    at = Timing(
        received_ns=1_000_000, accepted_ns=2_000_000, admitted_ns=4_000_000, started_ns=7_000_000,
        loaded_ns=11_000_000, first_token_ns=16_000_000,
    )  # fmt: skip
    report = timing_report(at, 1_000_000, 20_000_000)
    parts = (report.accept_ms, report.admit_ms, report.queue_ms, report.load_ms, report.compute_ms)

    assert parts == tuple(range(1, 6))
    assert report.first_token_ms == 15
    assert report.total_ms == 19


def test_timing_without_loads_has_no_load_time() -> None:
    """Compute then begins with the first step."""
    at = Timing(received_ns=1, accepted_ns=2, admitted_ns=3, started_ns=4_000_000, first_token_ns=9_000_000)
    report = timing_report(at, 1, 10_000_000)

    assert (report.load_ms, report.compute_ms) == (0.0, 5.0)


def test_unknown_times_are_null_and_clocks_that_disagree_give_no_negative_time() -> None:
    """A worker's clock may be behind the gateway's."""
    assert timing_report(None, 5, 9).first_token_ms is None
    assert timing_report(Timing(received_ns=9, accepted_ns=5), 9, 9).accept_ms == 0


ENTRY = TokenLogprob(token=HELLO, logprob=-0.5, top=((HELLO, -0.5), (7, -1.5), (8, float("-inf"))))


def test_chat_logprobs_name_bytes_and_the_most_likely() -> None:
    """As many as asked for; minus infinity becomes a number that JSON has."""
    found = chat_logprobs([ENTRY], 3, TEXTS).content[0]

    assert (found.token, bytes(found.bytes or []), found.logprob) == (" the", b" the", -0.5)
    assert [top.logprob for top in found.top_logprobs] == [-0.5, -1.5, LEAST_LOGPROB]
    assert chat_logprobs([ENTRY], 0, TEXTS).content[0].top_logprobs == []


def test_completion_logprobs_include_the_chosen_token_beyond_the_top() -> None:
    """Lists of equal length, offsets in characters."""
    chosen = TokenLogprob(token=9, logprob=-7.0, top=((HELLO, -0.5),))
    found = completion_logprobs([None, ENTRY, chosen], 1, TEXTS, TextOffsets(TEXTS), first_token=7)

    assert found.tokens == [TEXTS.text(7), " the", TEXTS.text(9)]
    assert found.token_logprobs == [None, -0.5, -7.0]
    assert found.top_logprobs == [None, {" the": -0.5}, {" the": -0.5, TEXTS.text(9): -7.0}]
    assert found.text_offset == [0, 1, 5]


def test_logprobs_without_the_most_likely_have_the_chosen_token() -> None:
    """Zero is a number of tokens beside the chosen one, as OpenAI and vLLM have it."""
    found = completion_logprobs([ENTRY], 0, TEXTS, TextOffsets(TEXTS))

    assert found.top_logprobs == [{" the": -0.5}]


def test_tokens_that_hold_parts_of_characters_are_told_apart() -> None:
    """By their bytes; and each stands where its character begins in the text."""
    text = "aé😀b"
    ids = tokenizer().encode_now(text, add_special_tokens=False)
    partial = [token for token in ids if "\ufffd" in TEXTS.text(token)]
    entries = [TokenLogprob(token, -1.0, tuple((other, -2.0) for other in ids)) for token in ids]
    offsets = TextOffsets(TEXTS)

    found = [completion_logprobs([entry], len(ids), TEXTS, offsets) for entry in entries]

    assert len(partial) > 2
    assert [len(one.top_logprobs[0] or {}) for one in found] == [len(set(ids))] * len(ids)
    assert [one.tokens[0] for one in found if one.tokens[0].startswith("bytes:")] == [
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in TEXTS.bytes(token)) for token in partial
    ]
    places = [len(b"".join(map(TEXTS.bytes, ids[:number])).decode(errors="ignore")) for number in range(len(ids))]
    assert [one.text_offset[0] for one in found] == places


@pytest.mark.parametrize(
    ("echo", "skips", "offsets"),
    [
        ("a the", True, [0, 0, 1, 1, 5, 5]),  # Special tokens are left out of the echo of token ids, ...
        ("<s>a<|end|> the", False, [0, 3, 4, 11, 15, 22]),  # ... unless they are asked for, ...
        ("a<|end|> the", True, [0, 0, 1, 8, 12, 12]),  # ... and stay in a text, where the tokenizer did not add them.
    ],
)
def test_tokens_that_are_left_out_have_no_characters(echo: str, skips: bool, offsets: list[int]) -> None:
    """An offset is a place in the text that is answered: the echo of four tokens, and two of the output."""
    (letter,) = tokenizer().encode_now("a", add_special_tokens=False)
    special = tokenizer().special_ids
    placed = TextOffsets(TEXTS, special=special, echo=echo, skips_special=skips)

    assert [placed.place(token) for token in (1, letter, 2, HELLO, 2, HELLO)] == offsets


def test_two_tokens_of_one_text_are_told_apart() -> None:
    """The second by its id, so that no entry is lost."""
    texts = TokenTexts(decode=lambda token: "same", piece=lambda token: "same", byte_level=False, special=set())
    entry = TokenLogprob(token=3, logprob=-3.0, top=((1, -1.0), (2, -2.0)))

    (top,) = completion_logprobs([entry], 2, texts, TextOffsets(texts)).top_logprobs

    assert top == {"same": -1.0, "token_id:2": -2.0, "token_id:3": -3.0}


def test_prompt_logprobs_have_vllms_shape() -> None:
    """By token id, each with its rank; a worker of an earlier release does not tell that of an unlikely token."""
    rare = TokenLogprob(token=9, logprob=-7.0, top=((HELLO, -0.5), (7, -1.5)), rank=812)
    untold = msgspec.structs.replace(rare, rank=0)
    found = prompt_logprob_list([None, rare, untold], 1, TEXTS)

    assert found[0] is None
    assert found[1] is not None
    assert found[2] is not None
    assert {token: (each.rank, each.logprob) for token, each in found[1].items()} == {
        str(HELLO): (1, -0.5),
        "9": (812, -7.0),
    }
    assert found[2]["9"].rank is None


def test_a_chat_chunk_without_news_is_not_sent() -> None:
    """Withheld text makes no chunk, unless token ids or logprobs were asked for."""
    made = generation()
    plain = ChatView(made, HEAD, Wanted(), TEXTS, lambda: 0)
    with_ids = ChatView(made, HEAD, Wanted(token_ids=True), TEXTS, lambda: 0)

    assert plain.chunk(made.choices[0], Delta(tokens=[5])) is None
    assert msgspec.json.decode(with_ids.chunk(made.choices[0], Delta(tokens=[5])) or b"")["choices"][0][
        "token_ids"
    ] == [5]


def test_the_usage_chunk_has_no_choices() -> None:
    """OpenAI's form of include_usage; other chunks carry null."""
    made = generation()
    view = ChatView(made, HEAD, Wanted(usage_chunk=True), TEXTS, lambda: 0)
    opening = msgspec.json.decode(view.opening()[0])
    closing = msgspec.json.decode(view.closing()[0])

    assert opening["usage"] is None
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert closing["choices"] == []
    assert closing["usage"]["prompt_tokens"] == 8


def test_the_chunk_of_the_role_counts_no_token() -> None:
    """The first token may have come, and is that of the chunk with its text."""
    made = generation()
    view = ChatView(made, HEAD, Wanted(usage_chunk=True, continuous_usage=True), TEXTS, lambda: 0)
    feed(made.choices[0], tokens=1, device=4, host=0)
    role = msgspec.json.decode(view.opening()[0])
    token = msgspec.json.decode(view.chunk(made.choices[0], made.choices[0].assembly.take()) or b"")

    assert [chunk["usage"]["completion_tokens"] for chunk in (role, token)] == [0, 1]
    assert [chunk["usage"]["total_tokens"] for chunk in (role, token)] == [8, 9]
    assert role["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_an_echo_without_output_hides_the_token_that_was_generated() -> None:
    """max_tokens 0 scores a prompt: no text, no output tokens, the reason is length."""
    made = generation()
    view = CompletionView(made, HEAD, Wanted(), TEXTS, lambda: 0, echoes=["prompt"], hides_output=True)
    feed(made.choices[0], tokens=1, device=0, host=0)
    whole = msgspec.json.decode(view.whole())

    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("prompt", "length")
    assert whole["usage"]["completion_tokens"] == 0


def test_a_streamed_echo_comes_once() -> None:
    """With the first chunk of each choice."""
    made = generation()
    view = CompletionView(made, HEAD, Wanted(), TEXTS, lambda: 0, echoes=["prompt "])
    texts = []
    for text in ("", "a", "b"):
        chunk = view.chunk(made.choices[0], Delta(text=text, tokens=[1]))
        texts.append(msgspec.json.decode(chunk)["choices"][0]["text"] if chunk else None)

    assert texts == ["prompt ", "a", "b"]


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(usage_chunk=True), Wanted(token_ids=True), Wanted(logprobs=1)])
@pytest.mark.parametrize("view_of", [ChatView, CompletionView])
def test_a_view_that_was_prepared_writes_the_same(view_of: type[ChatView | CompletionView], wanted: Wanted) -> None:
    """What needs no token is only encoded earlier."""
    finishes: tuple[FinishReason | None, ...] = (None, None, "length")
    streams = []
    for is_prepared in (True, False):
        made = generation(n=2)
        view = view_of(made, HEAD, wanted, TEXTS, lambda: 0)
        if is_prepared:
            view.prepare()
        sent = view.opening()
        for index, finish in enumerate(finishes):
            for choice in made.choices:
                say_one(choice, index, finish)
                sent.append(view.chunk(choice, choice.assembly.take()) or b"")
        streams.append([*sent, *view.closing()])

    assert streams[0] == streams[1]


def say_one(choice: Choice, index: int, finish: FinishReason | None) -> None:
    logprob = TokenLogprob(token=HELLO, logprob=-0.5, top=((HELLO, -0.5),))
    item = TokenItem(
        request_id=choice.request_id, attempt=1, index=index, tokens=(HELLO,), text=" the", logprobs=(logprob,),
        finish=finish, usage=Usage(device_tokens=3),
    )  # fmt: skip
    choice.accept("w", item, 1.0)
