# /// script
# dependencies = ["ag2[openai]==1.2.1"]
# ///
"""AG2: an agent over chat completions, streamed and not, and over the Responses API."""

import asyncio

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from asked import LISBON, NEWS, URL, WEATHER, City, check, get_weather

own = {"model": "demo", "base_url": URL, "api_key": "-"}


async def run():
    configs = OpenAIConfig(**own), OpenAIConfig(streaming=True, **own), OpenAIResponsesConfig(**own)
    for config in configs:
        agent = Agent("a", prompt="Be kind.", config=config, tools=[get_weather])
        check((await agent.ask(WEATHER)).body, NEWS)
        typed = Agent("b", config=config, response_schema=City)
        check(await (await typed.ask("Lisbon?")).content(), LISBON)


asyncio.run(run())
