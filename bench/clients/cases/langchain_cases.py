"""LangChain's models."""

from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, case, check, run


def model(**more):
    return ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, model=MODEL, max_tokens=300, max_retries=0, **more)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"] = Field(description="where")
    days: int = Field(ge=0, le=14)


@tool
def weather(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days} days"


@case("ChatOpenAI.invoke")
def invoke() -> None:
    check(model().invoke(QUESTION).content, "there is text")


@case("ChatOpenAI.stream")
def stream() -> None:
    check("".join(chunk.content for chunk in model().stream(QUESTION)), "there is text")


@case("bind_tools with tool_choice any, and the result given back")
def bind_tools() -> None:
    bound = model().bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    said = bound.invoke(QUESTION)
    (call,) = said.tool_calls
    check(call["args"]["city"] in ("Paris", "Rome"), str(call))
    result = ToolMessage(content=weather.invoke(call["args"]), tool_call_id=call["id"])
    model().bind_tools([weather]).invoke([HumanMessage(QUESTION), said, result])


@case("bind_tools, streamed")
def bind_tools_streamed() -> None:
    bound = model().bind_tools([weather], tool_choice="weather", strict=True)
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    check(whole.tool_calls, "a call")


@case("with_structured_output, json_schema")
def by_schema() -> None:
    check(isinstance(model().with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather), "typed")


@case("with_structured_output, function_calling")
def by_function() -> None:
    typed = model().with_structured_output(Weather, method="function_calling", strict=True)
    check(isinstance(typed.invoke(QUESTION), Weather), "typed")


@case("ChatOpenAI over responses")
def responses() -> None:
    check(model(use_responses_api=True).invoke(QUESTION).content, "there is text")


@case("ChatAnthropic.invoke and bind_tools")
def over_messages() -> None:
    other = ChatAnthropic(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=300, max_retries=0)
    check(other.invoke(QUESTION).content, "there is text")
    check(other.bind_tools([weather], tool_choice="any").invoke(QUESTION).tool_calls, "a call")


if __name__ == "__main__":
    run()
