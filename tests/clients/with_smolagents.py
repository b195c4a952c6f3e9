# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: an agent that calls tools, streamed and not."""

from asked import NEWS, URL, WEATHER, check, get_weather
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

get_weather.__doc__ += "\n\nArgs:\n    city: The city.\n"
model = OpenAIServerModel(model_id="demo", api_base=URL, api_key="-")
for streams in False, True:
    agent = ToolCallingAgent(
        tools=[tool(get_weather)], model=model, stream_outputs=streams, verbosity_level=0
    )
    check(agent.run(WEATHER), NEWS)
