"""Grammars of calls: what a format writes is accepted, and nothing else."""

import random
import re
from concurrent.futures import Future

import jsonschema
import pytest

from tests.support.chat import guided
from tests.support.chat.byte_tokenizer import tokenizer_of
from tests.support.chat.guided import tempted_answer
from tests.support.chat.text import TOOLS, parse
from tests.support.chat.writers import RAW_STRINGS, WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.structured_outputs.marks import marks_of

hf = pytest.importorskip("llguidance.hf")
llguidance = pytest.importorskip("llguidance")
grammar = pytest.importorskip("vllm_metal_lite.structured_outputs.grammar")

ALL = pytest.mark.parametrize("name", list(WRITERS))
SINGLE = "llama3_json", "harmony"  # whose call is the whole answer
MARKED = pytest.mark.parametrize("name", [n for n in WRITERS if n not in SINGLE])
REQUIRED = ToolChoice("required")
READ, RUN, NOW = (
    ("read", {"path": "a.txt", "limit": 3}),
    ("run", {"cmd": "ls\n-l", "dry": True, "mode": "fast"}),
    ("now", {}),
)


def write(name: str, *calls) -> str:
    """What a grammar demands: Llama's marker is optional, and EOS ends Harmony's call."""
    return WRITERS[name](calls).removeprefix("<|python_tag|>").removesuffix("<|call|>")


def accepts(name: str, text: str, choice: ToolChoice = REQUIRED, tools=TOOLS) -> bool:
    lark = FORMATS[name].grammar(tools, choice, {}, "")
    tokenizer = llguidance.LLTokenizer("byte")
    assert not llguidance.LLMatcher.validate_grammar(lark, tokenizer)
    return guided.accepts(tokenizer, lark, text.encode())


@ALL
@pytest.mark.parametrize("call", [READ, RUN, NOW], ids=lambda call: call[0])
def test_calls_are_accepted(name, call):
    text = write(name, call)
    assert accepts(name, text)
    assert accepts(name, text, ToolChoice("named", call[0]))
    assert not accepts(name, text[:-1])
    assert not accepts(name, f"So: {text}")


@ALL
def test_bad_calls_are_not_accepted(name):
    assert not accepts(name, write(name, ("erase", {})))
    assert not accepts(name, write(name, ("read", {"path": "a", "limit": "many"})))
    assert not accepts(name, write(name, ("read", {"limit": 3})))
    assert not accepts(name, write(name, ("run", {"cmd": "a", "mode": "other"})))
    assert not accepts(name, write(name, READ), ToolChoice("named", "run"))


@MARKED
def test_several_calls_only_where_they_may_be_parallel(name):
    text = write(name, READ, NOW)
    assert accepts(name, text)
    assert not accepts(name, text, ToolChoice("required", parallel=False))


@MARKED
def test_calls_among_text_where_none_is_demanded(name):
    auto, call, bad = ToolChoice("auto"), write(name, READ), write(name, ("read", {"limit": 3}))
    for text in ("", "So be it.", call, f"So: {call}", f"So: {call}\nand {call} then"):
        assert accepts(name, text, auto), text
    assert not accepts(name, f"So: {bad}", auto)
    assert accepts(name, f"So: {call}", ToolChoice("auto", parallel=False))
    assert not accepts(name, f"{call} {call}", ToolChoice("auto", parallel=False))


RICH = Tool("put", "", {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/node"}, "kind": {"const": "a b"}, "free": {"type": "object"},
        "level": {"enum": [1, "it's", None, True]}, "text": {"type": ["string", "null"]},
        "many": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
    },
    "required": ["at", "many"],
    "$defs": {"node": {
        "type": "object", "required": ["x"], "additionalProperties": False,
        "properties": {"x": {"type": ["integer", "null"]}, "next": {"$ref": "#/$defs/node"}},
    }},
})  # fmt: skip
VALUES = {
    "at": {"x": 1, "next": {"x": None}}, "kind": "a b", "level": "it's", "many": [1, "b"],
    "text": "c", "free": {"k": [True]},
}  # fmt: skip


# As Pydantic, FastMCP and zod write shared parts.
REFERRING = Tool("refer", "", {
    "type": "object",
    "properties": {
        "color": {"$ref": "#/$defs/color"}, "alias": {"$ref": "#/$defs/text"},
        "shade": {"allOf": [{"$ref": "#/$defs/color"}], "default": "red"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
        "flag": {"type": "boolean"}, "twin": {"$ref": "#/properties/flag"},
        "inner": {"$ref": "#"},
    },
    "required": ["color", "shade", "maybe", "flag", "twin"],
    "additionalProperties": False,
    "$defs": {"color": {"type": "string", "enum": ["red", "1"]}, "text": {"type": "string"}},
})  # fmt: skip
REFERRED = {
    "color": "1", "alias": "true", "shade": "red", "maybe": None, "flag": True, "twin": False,
}  # fmt: skip
# Claude Code's Grep has `-A`, an MCP server `resolve-library-id`.
ODD = Tool("resolve-library-id", "", {
    "type": "object",
    "properties": {
        "-A": {"type": "integer"}, "class": {"type": "string"}, "a.b": {"type": "boolean"},
        "$x": {"type": "array", "items": {"type": "string"}}, "any value": {"title": "V"},
    },
    "required": ["-A", "class", "a.b", "$x"],
    "additionalProperties": False,
})  # fmt: skip
ODDLY = {"-A": 3, "class": "n(a=b)", "a.b": True, "$x": ["f(x=1)", "it's"], "any value": "abc"}
# As zod writes the root; either argument is needed.
EITHER = Tool("find", "", {
    "$ref": "#/definitions/find",
    "definitions": {"find": {
        "type": "object", "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
        "anyOf": [{"required": ["id"]}, {"required": ["text"]}],
    }}})  # fmt: skip
EXAMPLES = {RICH.name: VALUES, REFERRING.name: REFERRED, ODD.name: ODDLY, "find": {"id": 1}}


@ALL
@pytest.mark.parametrize("tool", [REFERRING, ODD, EITHER], ids=lambda tool: tool.name)
def test_calls_are_read_as_they_were_meant(name, tool):
    call = tool.name, EXAMPLES[tool.name]
    assert accepts(name, write(name, call), tools=[tool])
    assert parse(FORMATS[name], WRITERS[name]([call]), [tool]).called == [call]
    assert not accepts(name, write(name, (tool.name, {})), tools=[tool])


# Where the markers are special tokens of the tokenizer

MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]|</?[a-z_:]*(?:tool_calls?|TOOLCALL)>")


def accepts_tokens(name: str, mode: str, text: str, special: bool = True) -> bool:
    tokenizer = tokenizer_of(set(MARKER.findall(text)), special)
    lark = FORMATS[name].grammar(TOOLS, ToolChoice(mode), marks_of(tokenizer), "")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return guided.accepts(hf.from_tokenizer(tokenizer), lark, tokens)


@ALL
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
def test_a_call_with_markers_of_one_token(name, mode, special):
    assert accepts_tokens(name, mode, write(name, READ), special)


def temptations(name: str) -> list[str]:
    """Texts that lenient reading takes for calls; their arguments break the schema of `read`."""
    bad, good = write(name, ("read", {"limit": "many"})), write(name, ("read", READ[1]))
    found = [
        bad,
        f" \n {bad}",
        f"So: {bad}",
        f"<|python_tag|>{bad}",
        f"So: {WRITERS[name](NO_PATH)}",
    ]
    found.append(re.sub(r"^<\S*tool_call>\s*", "", bad))  # without the outer mark
    found += [re.sub('name="(read|limit)"', rf"name={q}\1{q}", bad) for q in ("", "'")]
    if marks := FORMATS[name].thoughts:
        found.append(f"{marks.start}{bad}{marks.end}{bad}")
    if end := RAW_STRINGS.get(name):  # the next argument, or the call's end, within a string
        between = good[good.index("a.txt") + 5 : good.index("3")]
        for inner in (between, between.replace(end, ""), good[good.index("3") + 1 :]):
            found.append(good.replace("a.txt", f"<![CDATA[a{inner}many"))
            found.append(good.replace("a.txt", f"a{inner.replace(end, '')}many"))
    return found


NO_PATH = [("read", {"limit": 3})]


@ALL
@pytest.mark.parametrize("special", [True, False], ids=["special", "spelled"])
def test_what_a_strict_answer_is_read_as_follows_the_schema(name, special):
    """The reader takes no text for a call that the grammar did not take for one."""
    schemas = {
        "read": {**TOOLS[0].parameters, "additionalProperties": False},
        "function": {
            "type": "object", "additionalProperties": False, "required": ["parameter"],
            "properties": {
                "parameter": {"type": "array", "items": {"type": "string"}},
                "note": {"type": ["string", "null"]}, "mode": {"enum": ["fast", "slow"]},
            },
        },
    }  # fmt: skip
    tools = [Tool(name, "", schema, strict=True) for name, schema in schemas.items()]
    good = write(name, READ)
    plain = tokenizer_of(set(MARKER.findall(good)), True)
    tokenizer = hf.from_tokenizer(plain) if special else llguidance.LLTokenizer("byte")
    marks, num_calls = marks_of(plain) if special else {}, 0
    compiled: Future[llguidance.LLMatcher] = Future()
    lark = FORMATS[name].grammar(tools, ToolChoice("auto"), marks, "")
    compiled.set_result(llguidance.LLMatcher(tokenizer, lark))
    ends, size = [tokenizer.eos_token], tokenizer.vocab_size
    for seed, text in enumerate([good, *temptations(name)] * 4):
        constraint = grammar.GrammarConstraint(compiled, size)
        if not special:
            wanted = [*text.encode()]
        elif seed % 2:
            wanted = plain.encode(text, add_special_tokens=False)
        else:  # markers are spelled
            wanted = [i for c in text for i in plain.encode(c, add_special_tokens=False)]
        rng, stray = random.Random(seed), seed % 4 // 2 * 0.05
        tokens = tempted_answer(constraint, size, ends, wanted, rng, stray)
        answer = plain.decode(tokens) if special else bytes(tokens).decode(errors="replace")
        said = parse(FORMATS[name], answer, tools, is_held=True)
        for call in said.calls:
            assert call.is_whole or len(tokens) == 400, answer
            if call.is_whole:
                jsonschema.validate(call.arguments, schemas[call.name])
        num_calls += len(said.calls)
    assert num_calls > 3


def test_channels():
    before = "".join(
        f"<|channel|>{channel}<|message|>I look.<|end|><|start|>assistant"
        for channel in ("analysis", "commentary", "analysis")
    )
    call = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": %s}'
    final = "<|channel|>final<|message|>Done."
    for begun in "", before:
        assert accepts_tokens("harmony", "auto", begun + final)
        assert not accepts_tokens("harmony", "required", begun + final)
        for mode in "auto", "required":
            assert accepts_tokens("harmony", mode, begun + call % '"a"')
            assert not accepts_tokens("harmony", mode, begun + call % 5)


def test_only_thoughts_precede_a_form_in_its_channel():
    final, schema = "<|channel|>final<|message|>5", '%json {"type": "integer"}'
    tokenizer = tokenizer_of(set(MARKER.findall(f"{final}<|end|><|start|><|constrain|>")), True)
    for tools in TOOLS, ():
        lark = FORMATS["harmony"].grammar(tools, ToolChoice("auto"), marks_of(tokenizer), schema)
        for channel, taken in ("analysis", True), ("commentary", False):
            text = f"<|channel|>{channel}<|message|>Hm.<|end|><|start|>assistant{final}"
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert guided.accepts(hf.from_tokenizer(tokenizer), lark, tokens) == taken
