# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's Agents SDK: Responses and chat completions, streamed and not."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import LISBON, NEWS, URL, WEATHER, City, check, get_weather
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run(kind):
    model = kind(model="demo", openai_client=AsyncOpenAI(base_url=URL, api_key="-"))
    agent = Agent("a", instructions="Be kind.", model=model, tools=[function_tool(get_weather)])
    check((await Runner.run(agent, WEATHER)).final_output, NEWS)
    streamed = Runner.run_streamed(agent, WEATHER)
    async for _ in streamed.stream_events():
        pass
    check(streamed.final_output, NEWS)
    typed = Agent("b", model=model, output_type=City)
    check((await Runner.run(typed, "Lisbon?")).final_output, LISBON)


for kind in OpenAIResponsesModel, OpenAIChatCompletionsModel:
    asyncio.run(run(kind))
