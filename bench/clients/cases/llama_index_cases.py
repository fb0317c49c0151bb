"""LlamaIndex's OpenAI-like model."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, case, check, run


def model(**more):
    return OpenAILike(
        model=MODEL,
        api_base=f"{BASE_URL}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=300,
        max_retries=0,
        **more,
    )


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=0, le=14)


def weather(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"sunny in {city} for {days} days"


@case("chat")
def chat() -> None:
    check(model().chat([ChatMessage(role="user", content=QUESTION)]).message.content, "there is text")


@case("stream_chat")
def stream_chat() -> None:
    check(list(model().stream_chat([ChatMessage(role="user", content=QUESTION)]))[-1].message.content, "there is text")


@case("complete")
def complete() -> None:
    check(model().complete(QUESTION).text, "there is text")


@case("chat_with_tools that must be called")
def tools() -> None:
    used = model()
    answer = used.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True)
    check(used.get_tool_calls_from_response(answer)[0].tool_name == "weather", "a call")


@case("structured_predict")
def structured() -> None:
    typed = model(should_use_structured_outputs=True).as_structured_llm(Weather)
    check(isinstance(typed.chat([ChatMessage(role="user", content=QUESTION)]).raw, Weather), "typed")


if __name__ == "__main__":
    run()
