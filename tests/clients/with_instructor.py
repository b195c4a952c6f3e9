# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""Instructor, in its ways to ask for an object."""

from asked import LISBON, URL, City, check
from instructor import Mode, from_openai
from openai import OpenAI

say = f"Lisbon? SAY<{LISBON.model_dump_json()}>"
texts = {Mode.TOOLS: "Lisbon?", Mode.JSON_SCHEMA: "Lisbon?", Mode.RESPONSES_TOOLS: "Lisbon?"}
for mode, text in {**texts, Mode.JSON: say, Mode.MD_JSON: say}.items():
    client = from_openai(OpenAI(base_url=URL, api_key="-"), mode=mode)
    messages = [{"role": "user", "content": text}]
    found = client.chat.completions.create(model="demo", response_model=City, messages=messages)
    check(found.model_dump(), LISBON.model_dump())
