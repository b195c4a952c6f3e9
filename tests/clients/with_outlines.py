# /// script
# dependencies = ["outlines[openai]==1.3.3"]
# ///
"""Outlines, over OpenAI's client and over vLLM's fields."""

import outlines
from asked import HELLO, LISBON, URL, City, check
from openai import OpenAI

client = OpenAI(base_url=URL, api_key="-")
for model in outlines.from_openai(client, "demo"), outlines.from_vllm(client, "demo"):
    check(model("hi"), HELLO)
    check("".join(model.stream("hi")), HELLO)
    check(
        City.model_validate_json(model("Lisbon? SAY<" + LISBON.model_dump_json() + ">", City)),
        LISBON,
    )
kinds = outlines.types.Choice(["sunny", "rainy"])
check(outlines.from_vllm(client, "demo")("Which? SAY<rainy>", kinds), "rainy")
