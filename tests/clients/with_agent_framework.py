# /// script
# dependencies = ["agent-framework-openai==1.17.0"]
# ///
"""Microsoft's Agent Framework: Responses, where it must not store, and chat completions."""

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from asked import LISBON, NEWS, URL, WEATHER, City, check, get_weather


async def run():
    for kind in OpenAIChatClient, OpenAIChatCompletionClient:
        client = kind(model="demo", base_url=URL, api_key="-")
        agent = Agent(
            client, instructions="Be kind.", tools=[get_weather], default_options={"store": False}
        )
        check((await agent.run(WEATHER)).text, NEWS)
        check((await agent.run(WEATHER, stream=True).get_final_response()).text, NEWS)
        found = await Agent(client).run(
            "Lisbon?", options={"response_format": City, "store": False}
        )
        check(found.value, LISBON)


asyncio.run(run())
