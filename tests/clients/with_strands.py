# /// script
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""Strands Agents: an agent with a tool, and a typed answer."""

from asked import LISBON, NEWS, URL, WEATHER, City, check, get_weather
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"base_url": URL, "api_key": "-"}, model_id="demo")
agent = Agent(model=model, tools=[tool(get_weather)], callback_handler=None)
check(str(agent(WEATHER)).strip(), NEWS)
typed = Agent(model=model, callback_handler=None)
check(typed("Lisbon?", structured_output_model=City).structured_output, LISBON)
