"""Anthropic's own client."""

import anthropic

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, WEATHER, case, check, run

client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "weather", "description": "The weather", "input_schema": WEATHER}
LONG = "Remember that the sea is warm above the thermocline and cold below it. " * 40


@case("messages.create")
def create() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=12, messages=ASK, system="Be short.")
    check(answer.content[0].type == "text", "there is text")
    check(answer.stop_reason in ("end_turn", "max_tokens"), str(answer.stop_reason))


@case("messages.stream")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=12, messages=ASK) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    check(text == final.content[0].text, "the same text")
    check(final.usage.output_tokens > 0, "usage")


@case("tools, tool_choice any, and the result given back")
def tools() -> str:
    first = client.messages.create(
        model=MODEL,
        max_tokens=300,
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    check(first.stop_reason == "tool_use", str(first.stop_reason))
    (use,) = [block for block in first.content if block.type == "tool_use"]
    check(use.input["city"] in ("Paris", "Rome"), str(use.input))
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model=MODEL, max_tokens=12, messages=messages, tools=[TOOL])
    usage = first.usage
    said = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.output_tokens
    found = second.usage.cache_read_input_tokens
    check(found >= said - 32, f"{found} of {said} tokens were found")
    return f"{found} of {said} tokens found"


@case("tools, streamed")
def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=300, messages=ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    check("input_json" in kinds or "content_block_delta" in kinds, f"{set(kinds)}")
    check(any(block.type == "tool_use" for block in final.content), "a call")


@case("cache_control and usage of the cache")
def cache_control() -> str:
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    first = client.messages.create(model=MODEL, max_tokens=4, messages=ASK, system=system)
    second = client.messages.create(
        model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Another question"}], system=system
    )
    check(first.usage.cache_creation_input_tokens > 0, f"{first.usage}")
    check(second.usage.cache_read_input_tokens > 400, f"{second.usage}")
    return f"{second.usage.cache_read_input_tokens} tokens read"


@case("messages.count_tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=[TOOL]).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=ASK, tools=[TOOL]).usage
    check(counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens, f"{usage}")


@case("stop_sequences and top_k")
def stops() -> None:
    more = {"top_k": 5, "temperature": 0.5}  # Newer releases of the client have no fields for them.
    client.messages.create(model=MODEL, max_tokens=8, messages=ASK, stop_sequences=["e"], extra_body=more)


@case("images", refuses=True)
def images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    client.messages.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
    )


@case("a server tool", refuses=True)
def server_tool() -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    client.messages.create(model=MODEL, max_tokens=8, messages=ASK, tools=[tool])


if __name__ == "__main__":
    run()
