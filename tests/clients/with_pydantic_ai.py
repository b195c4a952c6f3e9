# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI: chat completions and the Responses API."""

import asyncio

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, get_weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def streamed(agent):
    async with agent.run_stream("hi") as reply:
        return "".join([piece async for piece in reply.stream_text(delta=True)])


for kind in OpenAIChatModel, OpenAIResponsesModel:
    model = kind("demo", provider=OpenAIProvider(base_url=URL, api_key="-"))
    check(asyncio.run(streamed(Agent(model))), HELLO)
    check(Agent(model, tools=[get_weather]).run_sync(WEATHER).output, NEWS)
    for form in City, NativeOutput(City):
        check(Agent(model, output_type=form, tools=[get_weather]).run_sync(WEATHER).output, LISBON)
