# /// script
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI: a crew of one with a tool, and a typed result."""

from asked import LISBON, NEWS, URL, WEATHER, City, check, get_weather
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

for streams in False, True:
    llm = LLM(model="openai/demo", base_url=URL, api_key="-", stream=streams)
    agent = Agent(role="guide", goal="help", backstory="kind", llm=llm, tools=[tool(get_weather)])
    task = Task(description=WEATHER, expected_output="a sentence", agent=agent)
    check(Crew(agents=[agent], tasks=[task]).kickoff().raw, NEWS)
    check(llm.call("Lisbon?", response_model=City), LISBON)
