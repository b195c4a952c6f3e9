"""vLLM's and SGLang's parsers find the same calls as ours.

SGLang's come from llm-router-utils, fetched when the test runs.
"""

import importlib
import json
import re
import sys

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from tests.support.chat.byte_tokenizer import tokenizer_of
from tests.support.chat.real_parts import package
from tests.support.chat.text import TOOLS, parse
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS

CALLS = {
    "plain": [("read", {"path": "src/a b.txt", "limit": 3})],
    "quotes": [("run", {"cmd": "echo 'ä' > \"x\" \\n && ls", "dry": True, "mode": "fast"})],
    "nested": [("run", {"cmd": "ls\nls", "env": {"A": [1, {"b": 2}]}, "args": [1, "x"]})],
    "empty": [("now", {})],
    "two": [("read", {"path": "123"}), ("run", {"cmd": "false", "scale": 0.5})],
}
# Other names of our formats there.
VLLM = {"mistral_list": "mistral", "tool_calls_json": "jamba"}
REGISTERED = ToolParserManager.list_registered()
SGLANG = {
    "hermes": ("qwen25_detector", "Qwen25Detector"),
    "qwen3_coder": ("qwen3_coder_detector", "Qwen3CoderDetector"),
    "glm45": ("glm4_moe_detector", "Glm4MoeDetector"),
    "glm47": ("glm47_moe_detector", "Glm47MoeDetector"),
    "llama3_json": ("llama32_detector", "Llama32Detector"),
    "mistral": ("mistral_detector", "MistralDetector"),
    "deepseek_v3": ("deepseekv3_detector", "DeepSeekV3Detector"),
    "deepseek_v31": ("deepseekv31_detector", "DeepSeekV31Detector"),
    "deepseek_v32": ("deepseekv32_detector", "DeepSeekV32Detector"),
    "deepseek_v4": ("deepseekv4_detector", "DeepSeekV4Detector"),
    "kimi_k2": ("kimik2_detector", "KimiK2Detector"),
    "minimax_m2": ("minimax_m2", "MinimaxM2Detector"),
    "lfm2": ("lfm2_detector", "Lfm2Detector"),
    "gemma4": ("gemma4_detector", "Gemma4Detector"),
}
# Lossy: a number in a list is a string (vLLM's gemma4), "false" is "False"
# (SGLang's glm45).
LOSSY = {("vllm", "gemma4", "nested"), ("sglang", "glm45", "two")}
_MARKS = re.compile(r"<[^<>\s=\"']*>|<\|\"\|>|\[[A-Z_]+\]|｜DSML｜")
_ALWAYS = (
    "<think> </think> <tool_call> </tool_call> <|channel> <channel|> <|turn> <turn|> "
    '<|tool_response> <tool_response|> <|"|>'
)
CASES = pytest.mark.parametrize("case", CALLS)


@pytest.fixture(scope="module")
def sglang():
    path = str(package("llm-router-utils", "0.8.1"))
    sys.path.append(path)
    yield "llm_router_utils.sglang.srt"
    sys.path.remove(path)


def check(engine: str, name: str, case: str, found: list) -> None:
    ours = parse(FORMATS[name], WRITERS[name](CALLS[case])).called
    assert ours == CALLS[case]
    assert (found == ours) == ((engine, name, case) not in LOSSY), found


@CASES
@pytest.mark.parametrize("name", [name for name in WRITERS if VLLM.get(name, name) in REGISTERED])
def test_as_vllm(name, case):
    text = WRITERS[name](CALLS[case])
    request = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "Go."}],
        tools=[tool.for_template() for tool in TOOLS],
    )
    # vLLM's parsers look markers up.
    tokenizer = tokenizer_of({*_ALWAYS.split()} | set(_MARKS.findall(text)), special=False)
    parser = ToolParserManager.get_tool_parser(VLLM.get(name, name))
    found = parser(tokenizer, request.tools).extract_tool_calls(text, request).tool_calls
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found]
    check("vllm", name, case, calls)


@CASES
@pytest.mark.parametrize("name", SGLANG)
def test_as_sglang(sglang, name, case):
    module, detector = SGLANG[name]
    protocol = importlib.import_module(f"{sglang}.entrypoints.openai.protocol")
    parser = getattr(importlib.import_module(f"{sglang}.function_call.{module}"), detector)()
    tools = [protocol.Tool(**tool.for_template()) for tool in TOOLS]
    found = parser.detect_and_parse(WRITERS[name](CALLS[case]), tools).calls
    calls = [(call.name, json.loads(call.parameters or "{}")) for call in found]
    check("sglang", name, case, calls)
