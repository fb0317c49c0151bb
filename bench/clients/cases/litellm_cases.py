"""LiteLLM, as a library, in both dialects."""

import json

import litellm

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, WEATHER, case, check, run

ASK = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": KEY, "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0}


@case("openai/: completion")
def completion() -> None:
    check(litellm.completion(messages=ASK, max_tokens=8, **OPENAI).choices[0].message.content, "there is text")


@case("openai/: streamed")
def streamed() -> None:
    chunks = list(litellm.completion(messages=ASK, max_tokens=8, stream=True, **OPENAI))
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "there is text")


@case("openai/: a tool that must be called")
def tools() -> None:
    answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=300, **OPENAI)
    call = answer.choices[0].message.tool_calls[0]
    check(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call.function.arguments)


@case("openai/: response_format json_schema")
def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = litellm.completion(messages=ASK, response_format=form, max_tokens=200, **OPENAI)
    check("city" in json.loads(answer.choices[0].message.content), "the schema's form")


@case("openai/: responses")
def responses() -> None:
    answer = litellm.responses(input=QUESTION, max_output_tokens=8, **OPENAI)
    check(answer.output, "there is output")


@case("anthropic/: completion")
def messages() -> None:
    check(litellm.completion(messages=ASK, max_tokens=8, **ANTHROPIC).choices[0].message.content, "there is text")


@case("anthropic/: a tool that must be called")
def messages_tools() -> None:
    answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=300, **ANTHROPIC)
    check(answer.choices[0].message.tool_calls, "a call")


if __name__ == "__main__":
    run()
