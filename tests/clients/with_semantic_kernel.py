# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel: chat, stream, plugins, structured output, embeddings."""

import asyncio

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, check_vectors, get_weather
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather:
    get = staticmethod(kernel_function(get_weather, name="get_weather"))


async def run():
    client = AsyncOpenAI(base_url=URL, api_key="-")
    chat = OpenAIChatCompletion(ai_model_id="demo", async_client=client)
    history = ChatHistory(system_message="Be kind.")
    history.add_user_message("hi")
    settings = OpenAIChatPromptExecutionSettings()
    check(str(await chat.get_chat_message_content(history, settings)), HELLO)
    pieces = [str(p) async for p in chat.get_streaming_chat_message_content(history, settings)]
    check("".join(pieces), HELLO)
    agent = ChatCompletionAgent(service=chat, name="a", plugins=[Weather()])
    check(str((await agent.get_response(WEATHER)).content), NEWS)
    pieces = [str(p.content) async for p in agent.invoke_stream(WEATHER)]
    check("".join(pieces), NEWS)
    typed = OpenAIChatPromptExecutionSettings(response_format=City)
    found = await chat.get_chat_message_content(history, typed)
    check(City.model_validate_json(str(found)), LISBON)
    vectors = OpenAITextEmbedding(ai_model_id="demo", async_client=client)
    both = await vectors.generate_embeddings(["A dog", "Once"])
    check_vectors(both, (await vectors.generate_embeddings(["Once"]))[0])


asyncio.run(run())
