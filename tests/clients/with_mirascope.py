# /// script
# dependencies = ["mirascope[openai]==2.8.2"]
# ///
"""Mirascope: Responses and chat completions, called and streamed."""

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, get_weather
from mirascope import llm

llm.register_provider("openai", scope="openai/", base_url=URL, api_key="-")
for name in "openai/demo:completions", "openai/demo:responses":
    model = llm.Model(name)
    check(model.call("hi").text(), HELLO)
    check("".join(model.stream("hi").text_stream()).strip(), HELLO)
    answer = model.call(WEATHER, tools=[llm.tool(get_weather)])
    check(answer.resume(answer.execute_tools()).text(), NEWS)
    for mode in "strict", "tool":
        check(model.call("Lisbon?", format=llm.format(City, mode=mode)).parse(), LISBON)
