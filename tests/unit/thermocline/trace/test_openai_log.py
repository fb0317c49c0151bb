"""Lines of OpenAI-style logs: where their parts may stand, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thermocline.trace.openai_log import LogFault, LoggedRequest, read_line

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
ANSWER = {"usage": {"prompt_tokens": 12, "completion_tokens": 5}, "choices": [{"message": {"content": "hi"}}]}
TIME = 1_767_225_600


def read(**record: Any) -> LoggedRequest:
    """The request of a line."""
    return read_line(json.dumps(record).encode())


@pytest.mark.parametrize(
    "record",
    [
        {"timestamp": TIME, **CHAT, **ANSWER},
        {"timestamp": TIME, "request": CHAT, "response": ANSWER},
        {"timestamp": TIME, "body": CHAT, "response": {"status_code": 200, "body": ANSWER}},
        {"timestamp": TIME, "request": json.dumps(CHAT), "response": json.dumps(ANSWER)},
        {"request": {"method": "POST", "body": CHAT}, "response": {**ANSWER, "created": TIME}},
        {"request": {"body": json.dumps(CHAT)}, "response": {"body": json.dumps({**ANSWER, "created": TIME})}},
    ],
)
def test_a_request_is_found_wherever_loggers_put_it(record: dict[str, Any]) -> None:
    """At the top, in fields of its own, one deeper, or as text."""
    found = read(**record)

    assert (found.time_s, found.model, found.prompt_tokens, found.output_tokens) == (TIME, "m", 12, 5)
    assert "".join(map(str, found.prompts[0])) == "\n<user>\nhello"
    assert (found.answer, found.max_tokens) == ("hi", 9)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (TIME, TIME),
        (TIME + 0.25, TIME + 0.25),
        (TIME * 1000, TIME),
        (TIME * 10**6, TIME),
        (TIME * 10**9, TIME),
        (str(TIME), TIME),
        ("2026-01-01T00:00:00Z", TIME),
        ("2026-01-01T01:00:00+01:00", TIME),
        ("2026-01-01 00:00:00", TIME),
        (0, 0),
    ],
)
def test_times_may_have_any_usual_unit(value: Any, seconds: float) -> None:
    """Seconds to nanoseconds, by their size, or ISO 8601, which is UTC where it does not say."""
    assert read(**CHAT, **ANSWER, timestamp=value).time_s == seconds


def test_a_longer_conversation_begins_with_the_texts_of_the_shorter_one() -> None:
    """So its front has the same names; tools come first, as in templates."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    short = read(time=1, messages=turns[:1], tools=tools, **ANSWER).prompts[0]
    long = read(time=1, messages=turns, tools=tools, **ANSWER).prompts[0]

    assert long[: len(short)] == short
    assert len(long) > len(short)
    assert short[0] == '[{"type":"function","function":{"name":"f"}}]'


def test_parts_that_are_no_text_are_told_apart_and_counted() -> None:
    """An image is neither its bytes nor nothing."""

    def of(url: str) -> LoggedRequest:
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": "what is this"}, image]
        return read(time=1, messages=[{"role": "user", "content": content}], **ANSWER)

    one, two = of("data:one"), of("data:two")
    assert one.other_parts == 1
    assert one.prompts != two.prompts
    assert one.prompts == of("data:one").prompts
    assert "data:one" not in str(one.prompts)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", (("text",),)),
        ([1, 2], (((1, 2),),)),
        (["a", "b"], (("a",), ("b",))),
        ([[1], [2, 3]], (((1,),), ((2, 3),))),
    ],
)
def test_completions_have_text_or_ids_one_or_several(prompt: Any, prompts: Any) -> None:
    """As the API takes them."""
    assert read(time=1, prompt=prompt, **ANSWER).prompts == prompts


def test_what_several_answers_cost_is_divided_among_them() -> None:
    """Usage counts all of them."""
    choices = [{"text": "a"}, {"text": "b"}]

    assert read(time=1, prompt="x", choices=choices, usage={"completion_tokens": 9}).output_tokens == 5
    assert read(time=1, prompt=["x", "y", "z"], usage={"completion_tokens": 9}).output_tokens == 3


def test_an_answer_is_all_that_was_said() -> None:
    """Reasoning and calls are output, too."""
    message = {"reasoning_content": "hm", "content": None, "tool_calls": [{"id": "1"}]}

    assert read(time=1, prompt="x", choices=[{"message": message}]).answer == 'hm[{"id":"1"}]'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("secret", "no JSON object"),
        ('["secret"]', "no JSON object"),
        ('{"secret": 1}', "neither messages nor prompt"),
        ('{"request": "secret", "time": 1}', "request is text without a JSON object"),
        ('{"request": {"body": "secret"}, "time": 1}', "body of request is text without"),
        ('{"prompt": "secret"}', "no time: none of timestamp, time"),
        ('{"prompt": "secret", "time": "secret"}', "time is neither a number nor ISO 8601"),
        ('{"prompt": "secret", "time": true}', "time is neither a number of at least 0"),
        ('{"prompt": "secret", "time": -1}', "time is neither a number of at least 0"),
        ('{"prompt": "secret", "time": "nan"}', "time is neither a number of at least 0"),
        (f'{{"prompt": "secret", "time": 1{"0" * 400}}}', "time is neither a number of at least 0"),
        ('{"prompt": "", "time": 1}', "prompt must be text, token ids"),
        ('{"prompt": [1, "secret"], "time": 1}', "prompt must be text, token ids"),
        ('{"prompt": [[[1]]], "time": 1}', "prompt must be text, token ids"),
        ('{"prompt": [-1], "time": 1}', "token ids of prompt must be from 0"),
        ('{"messages": "secret", "time": 1}', "messages must be a list"),
        ('{"messages": [], "time": 1}', "messages must be a list"),
        ('{"messages": ["secret"], "time": 1}', "each of messages must be an object with a role"),
        ('{"messages": [{"role": "user", "content": 7}], "time": 1}', "content of a message must be text"),
        ('{"prompt": "secret", "time": 1, "choices": ["secret"]}', "each of choices must be an object"),
        ("[" * 100_000, "no JSON object"),
    ],
)
def test_a_line_that_is_no_request_says_why_without_its_text(line: str, reason: str) -> None:
    """Reasons are printed and kept in logs, where the text must not be."""
    with pytest.raises(LogFault) as fault:
        read_line(line.encode())

    assert reason in str(fault.value)
    assert "secret" not in str(fault.value)
