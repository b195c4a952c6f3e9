# /// script
# dependencies = ["llm==0.36"]
# ///
"""Simon Willison's llm: prompt, schema, tools."""

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, get_weather
from llm.default_plugins.openai_models import Chat

model = Chat("demo", api_base=URL, key="-", supports_tools=True, supports_schema=True)
model.key = "-"
for streams in True, False:
    check(model.prompt("hi", system="Be kind.", stream=streams).text(), HELLO)
    check(
        City.model_validate_json(model.prompt("Lisbon?", schema=City, stream=streams).text()),
        LISBON,
    )
    check(model.chain(WEATHER, tools=[get_weather], stream=streams).text(), NEWS)
