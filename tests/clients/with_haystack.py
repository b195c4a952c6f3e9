# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack: generator, agent, embedders."""

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, check_vectors, get_weather
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

own = {"api_base_url": URL, "api_key": Secret.from_token("-"), "model": "demo"}
hi = [ChatMessage.from_system("Be kind."), ChatMessage.from_user("hi")]
check(OpenAIChatGenerator(**own).run(hi)["replies"][0].text, HELLO)
pieces = []
streaming = OpenAIChatGenerator(streaming_callback=lambda c: pieces.append(c.content), **own)
check(streaming.run(hi)["replies"][0].text, HELLO)
check("".join(pieces), HELLO)
typed = OpenAIChatGenerator(generation_kwargs={"response_format": City}, **own)
check(City.model_validate_json(typed.run(hi)["replies"][0].text), LISBON)
tool = create_tool_from_function(get_weather)
agent = Agent(chat_generator=OpenAIChatGenerator(**own), tools=[tool])
check(agent.run(messages=[ChatMessage.from_user(WEATHER)])["last_message"].text, NEWS)
documents = OpenAIDocumentEmbedder(progress_bar=False, **own).run(
    [Document(content="A dog"), Document(content="Once")]
)
check_vectors(
    [d.embedding for d in documents["documents"]],
    OpenAITextEmbedder(**own).run("Once")["embedding"],
)
