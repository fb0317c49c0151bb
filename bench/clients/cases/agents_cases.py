"""OpenAI's Agents SDK, over chat completions and over responses."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from bench.clients.harness import BASE_URL, KEY, MODEL, QUESTION, case, check, run

called = []


@function_tool
def weather(days: int) -> str:
    """The weather of so many days."""
    called.append(days)
    return "sunny"


class Report(BaseModel):
    days: int = Field(ge=0, le=14)
    sunny: bool


def model_of(kind):
    return kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, max_retries=0))


def settings(**more):
    return ModelSettings(max_tokens=200, temperature=0, **more)


def add(kind, title) -> None:
    @case(f"{title}: an agent that answers")
    async def answers():
        agent = Agent(name="a", instructions="Be short.", model=model_of(kind), model_settings=settings())
        check((await Runner.run(agent, QUESTION)).final_output is not None, "there is an answer")

    @case(f"{title}: an agent that must call a tool, and goes on with its result")
    async def calls():
        called.clear()
        agent = Agent(
            name="a",
            instructions="Call.",
            model=model_of(kind),
            tools=[weather],
            model_settings=settings(tool_choice="required", parallel_tool_calls=False),
        )
        result = await Runner.run(agent, QUESTION, max_turns=4)
        check(called, "the tool was called")
        return f"{len(result.raw_responses)} turns"

    @case(f"{title}: an output type")
    async def typed():
        agent = Agent(name="a", model=model_of(kind), output_type=Report, model_settings=settings())
        check(isinstance((await Runner.run(agent, QUESTION)).final_output, Report), "of the type")

    @case(f"{title}: streamed")
    async def streamed():
        # An answer by a schema ends by itself; the SDK raises for a response that its bound ends.
        agent = Agent(name="a", model=model_of(kind), output_type=Report, model_settings=settings())
        result = Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        check("raw_response_event" in kinds, f"{set(kinds)}")


add(OpenAIChatCompletionsModel, "chat completions")
add(OpenAIResponsesModel, "responses")

if __name__ == "__main__":
    run()
