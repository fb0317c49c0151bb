"""OpenAI's own client: chat, parsing, tools, responses."""

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, WEATHER, case, check, run

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
asynchronous = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0)
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FLAT = {"type": "function", "name": "weather", "description": "The weather", "parameters": WEATHER, "strict": True}
ASK = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=0, le=14)


@case("models.list")
def models():
    return [model.id for model in client.models.list()]


@case("chat.completions.create")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, seed=1)
    check(answer.choices[0].message.content, "there is text")
    check(answer.usage.prompt_tokens_details.cached_tokens is not None, "cached tokens are told")


@case("chat, streamed, with usage")
def chat_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), "there is text")
    check(chunks[-1].usage.completion_tokens > 0, "usage comes last")


@case("chat, logprobs and n=2")
def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, n=2, logprobs=True, top_logprobs=3, temperature=1
    )
    check(len(answer.choices) == 2, "two choices")
    check(len(answer.choices[0].logprobs.content[0].top_logprobs) == 3, "three likeliest")


@case("chat.completions.parse with a pydantic model")
def parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, max_tokens=200, seed=2)
    check(isinstance(answer.choices[0].message.parsed, Weather), "parsed")


@case("chat.completions.stream with a pydantic model")
def parse_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Weather, max_tokens=200, seed=3
    ) as stream:
        for _ in stream:
            pass
        check(isinstance(stream.get_final_completion().choices[0].message.parsed, Weather), "parsed")


@case("response_format json_object")
def json_object():
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=400, seed=4, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        check(isinstance(json.loads(answer.choices[0].message.content), dict), "an object")
    return answer.choices[0].finish_reason


@case("tools, tool_choice=auto")
def tools_auto() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], max_tokens=16)
    check(answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), "it ends")


@case("tools, tool_choice=required")
def tools_required():
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[STRICT], tool_choice="required", max_tokens=300, parallel_tool_calls=False
    )
    choice = answer.choices[0]
    check(choice.finish_reason == "tool_calls", f"finish_reason is {choice.finish_reason}")
    (call,) = choice.message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    return call.function.arguments


@case("tools, one by name, streamed")
def tools_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[STRICT],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        stream=True,
        max_tokens=300,
    )
    name, arguments = "", ""
    for chunk in stream:
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    check(name == "weather", f"name is {name!r}")
    Weather.model_validate_json(arguments)


@case("tools, two turns, and the second finds the first")
def tools_turns() -> str:
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[STRICT], tool_choice="required", max_tokens=300, parallel_tool_calls=False
    )
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    messages = [*ASK, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[STRICT], max_tokens=12)
    check(second.choices[0].message.content is not None, "there is text")
    cached = second.usage.prompt_tokens_details.cached_tokens
    said = first.usage.total_tokens
    check(cached >= said - 32, f"{cached} of {said} tokens were found")
    return f"{cached} of {said} tokens found"


@case("responses.create")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, instructions="Be short.", max_output_tokens=16)
    check(answer.status in ("completed", "incomplete"), answer.status)
    check(answer.output_text, "there is text")
    check(answer.usage.input_tokens_details.cached_tokens is not None, "cached tokens are told")


@case("responses, streamed")
def responses_streamed() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    check("response.output_text.delta" in kinds, f"{kinds}")
    check(kinds[-1] in ("response.completed", "response.incomplete"), kinds[-1])
    check(events[-1].response.output_text, "there is text")


@case("responses.parse with a pydantic model")
def responses_parsed() -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=200)
    check(isinstance(answer.output_parsed, Weather), "parsed")


@case("responses, function tools over two turns with previous_response_id")
def responses_tools() -> str:
    first = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[FLAT],
        tool_choice="required",
        max_output_tokens=300,
        parallel_tool_calls=False,
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[FLAT],
        max_output_tokens=12,
    )
    cached = second.usage.input_tokens_details.cached_tokens
    check(cached >= first.usage.total_tokens - 32, f"{cached} of {first.usage.total_tokens} tokens were found")
    return f"{cached} of {first.usage.total_tokens} tokens found"


@case("responses.retrieve and delete")
def responses_kept() -> None:
    made = client.responses.create(model=MODEL, input="hi", max_output_tokens=4)
    check(client.responses.retrieve(made.id).id == made.id, "the same")
    client.responses.delete(made.id)
    try:
        client.responses.retrieve(made.id)
    except openai.NotFoundError:
        return
    raise AssertionError("it is still there")


@case("AsyncOpenAI, chat streamed")
async def asynchronous_chat() -> None:
    async with asynchronous as used:
        stream = await used.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
        check([chunk async for chunk in stream], "there are chunks")


@case("completions.create")
def completions() -> None:
    check(client.completions.create(model=MODEL, prompt="The sea", max_tokens=8).choices[0].text, "there is text")


@case("images", refuses=True)
def images() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])


@case("audio", refuses=True)
def audio() -> None:
    client.chat.completions.create(
        model=MODEL, messages=ASK, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
    )


@case("responses with a hosted tool", refuses=True)
def hosted_tool() -> None:
    client.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "web_search"}])


@case("embeddings.create", refuses=True)
def embeddings() -> None:
    client.embeddings.create(model=MODEL, input="hi")


@case("a schema that is none", refuses=True)
def bad_schema() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    client.chat.completions.create(model=MODEL, messages=ASK, response_format=schema)


if __name__ == "__main__":
    run()
