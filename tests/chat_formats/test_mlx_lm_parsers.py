"""mlx-lm's parsers of whole calls find the same in a call as ours."""

import importlib
from importlib.util import find_spec

import pytest

from tests.support.chat.text import TOOLS, parse
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS

# Other names of our formats there.
RENAMED = {"hermes": "json_tools", "glm45": "glm47", "lfm2": "pythonic"}
MODULES = {name: f"mlx_lm.tool_parsers.{RENAMED.get(name, name)}" for name in WRITERS}
CALLS = [
    ("read", {"path": "src/a b.txt", "limit": 3}),
    ("run", {"cmd": "echo 'ä' > x && ls", "dry": True, "mode": "fast"}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if find_spec(module)])
def test_a_call(name, call):
    theirs = importlib.import_module(MODULES[name])
    text = WRITERS[name]([call])
    body = text[text.index(theirs.tool_call_start) + len(theirs.tool_call_start) :]
    body = body.removesuffix(theirs.tool_call_end) if theirs.tool_call_end else body
    found = theirs.parse_tool_call(body, [tool.for_template() for tool in TOOLS])
    [found] = found if isinstance(found, list) else [found]
    [(our_name, our_arguments)] = parse(FORMATS[name], text).called
    assert found["name"] == our_name
    assert found["arguments"] == our_arguments
