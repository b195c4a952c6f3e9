"""Slips of models: a call that means one thing is read, and no slip hides what follows it."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat.text import check_cuts, check_splits, cut, parse
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS

READ = ("read", {"path": "a.txt", "limit": 3})
NOW = ("now", {})
PATH = {"path": "a.txt"}

QWEN, GLM, GLM_BREAKS = ("qwen3_coder", "seed_oss"), ("glm47",), ("glm45",)
INVOKE, DSML = ("minimax_m2",), ("deepseek_v32", "deepseek_v4")
GEMMA, PYTHON = ("gemma4", "function_gemma"), ("lfm2", "olmo3")
LLAMA = ("llama3_json",)
QUOTE = {"gemma4": '<|"|>', "function_gemma": "<escape>"}
# A new format joins these families by what it writes.  The arguments are JSON:
AS_JSON = [name for name, write in WRITERS.items() if json.dumps(READ[1]) in write([READ])]
# the name stands before the object, or in it; the object is in a list, or each has its markers;
BEHIND_NAME = [name for name in AS_JSON if '"read"' not in WRITERS[name]([READ])]
LISTS = [name for name in AS_JSON if re.search(r"\[\s*\{", WRITERS[name]([READ]))]
ONE_JSON = [name for name in AS_JSON if name not in (*BEHIND_NAME, *LISTS, *LLAMA)]
# all calls stand behind one marker.
MARKED = [name for name in WRITERS if FORMATS[name].read_answer is None]
TOGETHER = [n for n in MARKED if WRITERS[n]([NOW, NOW]).count(FORMATS[n].call_starts[0]) == 1]
SECTIONS = [name for name in TOGETHER if name not in (*LISTS, *LLAMA, *PYTHON)]


def run(**values):
    return ("run", {"cmd": "ls", **values})


# What the model meant, a part of the text that the format's writer makes of it, the model's slip;
# the arguments that are read, None for a call that went wrong.
SLIPS = {
    # Tags
    "no end of a value": [
        (QWEN, READ, "\n</parameter>\n<parameter=limit>", "\n<parameter=limit>", READ[1]),
        (QWEN, READ, "\n</parameter>\n<parameter=limit>", "<parameter=limit>", READ[1]),
        (QWEN, READ, "3\n</parameter>", "3", READ[1]),
        (QWEN, READ, "\n3\n</parameter>", "3", READ[1]),
        (GLM, READ, "a.txt</arg_value>", "a.txt", READ[1]),
        (GLM_BREAKS, READ, "a.txt</arg_value>", "a.txt", READ[1]),
        ((*GLM, *GLM_BREAKS), READ, "3</arg_value>", "3", READ[1]),
        (INVOKE, READ, "a.txt</parameter>", "a.txt", READ[1]),
        (INVOKE, READ, "3</parameter>", "3", READ[1]),
        (DSML, READ, "a.txt</｜DSML｜parameter>", "a.txt", READ[1]),
        (("minicpm5",), READ, "a.txt</param>", "a.txt", READ[1]),
    ],
    "no end of the last value": [
        (QWEN, ("read", PATH), "\n</parameter>\n</function>", "\n</function>", PATH),
        (INVOKE, ("read", PATH), "</parameter>", "", PATH),
        (DSML, ("read", PATH), "</｜DSML｜parameter>", "", PATH),
    ],
    "an end twice": [
        (QWEN, READ, "a.txt\n</parameter>", "a.txt\n</parameter>\n</parameter>", READ[1]),
        (QWEN, READ, "3\n</parameter>", "3\n</parameter>\n</parameter>", READ[1]),
        (GLM, READ, "a.txt</arg_value>", "a.txt</arg_value></arg_value>", READ[1]),
        (INVOKE, READ, "a.txt</parameter>", "a.txt</parameter></parameter>", READ[1]),
        (("minicpm5",), READ, "a.txt</param>", "a.txt</param></param>", READ[1]),
    ],
    "the end of a value within it": [
        (names, ("read", PATH), "a.txt", text, {"path": text})
        for names, text in [
            (QWEN, "a</parameter> b"), (QWEN, "a\n</parameter>\nb"),
            (QWEN, "<parameter=x>\n5\n</parameter>"), (QWEN, "a <parameter=b"),
            (QWEN, "a</function>b"), (QWEN, "<parameter=path>"),
            (GLM, "a</arg_value> b"), (GLM, "a<arg_key>b</arg_key>c"),
            (INVOKE, "a</parameter> b"), (INVOKE, '<parameter name="x">5</parameter>'),
            (DSML, "a</｜DSML｜parameter> b"), (("minicpm5",), "a</param> b"),
        ]
    ] + [
        (("minicpm5",), ("read", {"path": "a\nb"}), "a\nb", "a ]]> b", {"path": "a ]]> b"}),
        (QWEN, run(env={"A": "b"}), '"b"', '"</parameter> b"', run(env={"A": "</parameter> b"})[1]),
    ] + [
        (names, run(env={"A": "b"}), '"b"', f'"\\"{ends}"', run(env={"A": f'"{ends}'})[1])
        for names, ends in [
            (("qwen3_coder",), "</parameter></function></tool_call>"),
            (("seed_oss",), "</parameter><parameter=mode>"),
            ((*GLM, *GLM_BREAKS), "</arg_value></tool_call>"),
            (INVOKE, "</parameter></invoke></minimax:tool_call>"),
            (DSML, "</｜DSML｜parameter></｜DSML｜invoke>"), (("minicpm5",), "</param></function>"),
        ]
    ],
    "an argument twice, or its tag within another": [
        (QWEN, READ, "a.txt", 'T = "<parameter=limit>"', None),
        ((*GLM, *GLM_BREAKS), READ, "a.txt", "<arg_key>limit</arg_key>", None),
        (INVOKE, READ, "a.txt", 'T = \'<parameter name="limit">\'', None),
        (PYTHON, READ, "limit=3", "limit=3, limit=4", None),
    ],
    "no end of the call": [
        (QWEN, READ, "\n</function>", "", READ[1]),
        (INVOKE, READ, "</invoke>\n", "", READ[1]),
        (("lfm2",), READ, "<|tool_call_end|>", "", READ[1]),
        (("olmo3",), READ, "</function_calls>", "", READ[1]),
    ],
    "the end of the call twice": [
        (("hermes", "qwen3_coder", *GLM), READ, "</tool_call>", "</tool_call>\n" * 2, READ[1]),
        (("gemma4",), READ, "<tool_call|>", "<tool_call|><tool_call|>", READ[1]),
    ],
    "a name without its number": [(("kimi_k2",), READ, "read:0", "read", READ[1])],
    "no tag of a value": [
        (GLM, READ, "<arg_value>3", "3", READ[1]),
        (GLM, READ, "<arg_value>a", "a", READ[1]),
        (GLM_BREAKS, READ, "<arg_value>3", "3", READ[1]),
        (GLM, READ, "limit</arg_key>", "limit", READ[1]),
    ],
    "no name": [
        (QWEN, READ, "<parameter=limit>", "<parameter=>", None),
        (QWEN, READ, "<parameter=limit>", "<parameter=", None),
        (QWEN, READ, "<parameter=path>", "<parameter=", None),
        (GLM, READ, "<arg_key>limit</arg_key>", "<arg_key></arg_key>", None),
        (GLM, READ, "<arg_key>limit</arg_key>", "<arg_key>", None),
        (INVOKE, READ, '<parameter name="limit">', "<parameter>", None),
        (INVOKE, READ, '<parameter name="limit">', "<parameter", None),
        (DSML, READ, ' name="limit" string="false">', "", None),
        (("minicpm5",), READ, '<param name="limit">', "<param name=>", None),
        (GEMMA, READ, "limit:", ":", None),
    ],
    "an end that is none": [
        (QWEN, READ, "a.txt\n</parameter>", "a.txt\n</parameter> x", None),
        (GLM, READ, "a.txt</arg_value>", 'a.txt</arg_value>"', None),
        (("gemma4",), READ, '<|"|>a.txt', "a.txt", None),
        (GLM, READ, "<arg_key>limit", "<arg_key><arg_key>limit", None),
    ],
    # Typed values
    "values that follow their schema": [
        (QWEN, ("run", {"cmd": "ls"}), "cmd>\nls\n", f"{name}>{text}", {name: value})
        for name, text, value in [
            ("cmd", "12", "12"), ("cmd", "\n\na\n\n", "\na\n"), ("dry", "True", True),
            ("scale", "\n2\n", 2), ("note", "null", None), ("note", "5", "5"),
            ("version", "5", "5"), ("args", "\nnot json\n", "not json"), ("other", "5", "5"),
        ]
    ],
    "numbers that JSON has not": [
        (names, run(scale=0.5), "0.5", number, run(scale=number)[1])
        for names in (QWEN, GLM, INVOKE, DSML, ("minicpm5",), GEMMA)
        for number in ("NaN", "Infinity", "-Infinity", "inf", "1e999")
    ] + [
        (QWEN, run(env={"A": 1}), "1}", "NaN}", run(env='{"A": NaN}')[1]),
        (PYTHON, run(scale=0.5), "0.5", "nan", run(scale="nan")[1]),
        (PYTHON, run(scale=0.5), "0.5", "1e999", None),
        (PYTHON, run(scale=0.5), "0.5", "0.5 # half\n", run(scale=0.5)[1]),
        (AS_JSON, run(scale=0.5), "0.5", "NaN", None),
    ],
    "Python's constants": [
        (names, run(dry=True), "true<", "True<", run(dry=True)[1])
        for names in (GLM, INVOKE, DSML, ("minicpm5",))
    ] + [
        ((*QWEN, *GEMMA), run(dry=True), "true", "True", run(dry=True)[1]),
        (QWEN, run(env={"A": True}), '{"A": true}', "{'A': True}", run(env={"A": True})[1]),
        (DSML, run(args=["x"]), '["x"]', "['x']", run(args=["x"])[1]),
        (GEMMA, run(args=[True]), "[true]", "[True]", run(args=[True])[1]),
        (PYTHON, run(mode="fast"), "fast", "fast", run(mode="fast")[1]),
    ],
    # Quotes
    "other quotes": [
        ((name,), READ, f"path:{q}a.txt{q}", f"path:{text}", {"path": value, "limit": 3})
        for name, q in QUOTE.items()
        for text, value in [
            ('"ab, c"', "ab, c"), ("'ab, c'", "ab, c"), ('"a\\n{b}"', "a\n{b}"), ("hello", "hello"),
            ('" a"', " a"), ("12", "12"),
        ]
    ] + [
        ((name,), READ, "path:", key, READ[1]) for name in GEMMA for key in ('"path":', "'path':",
         f"{QUOTE[name]}path{QUOTE[name]}:", ' "path" : ')
    ] + [
        (GEMMA, run(args=["x"]), None, '["x, y", z]', run(args=["x, y", "z"])[1]),
        (GEMMA, run(env={"A": 1}), "{A:1}", '{"A":1}', run(env={"A": 1})[1]),
        (GEMMA, run(env={"A": 1}), "1}", "[" * 2000, None),
    ] + [
        ((name,), READ, f"{q}a.txt{q}", "hello, world", None) for name, q in QUOTE.items()
    ],
    # JSON
    "other shapes": [
        (ONE_JSON, ("read", PATH), '{"name": "read", "arguments": {"path": "a.txt"}}', text, PATH)
        for text in (
            '{"arguments": {"path": "a.txt"}, "name": "read"}',
            '{"name": "read", "id": [1, {"a": "}"}], "parameters": {"path": "a.txt"}, "type": "f"}',
            '{"name": "read", "arguments": "{\\"path\\": \\"a.txt\\"}"}',
            '[{"name": "read", "arguments": {"path": "a.txt"}}]',
        )
    ],
    "empty arguments": [
        (ONE_JSON, NOW, '"arguments": {}', f'"arguments": {text}', {})
        for text in ("null", "[]", '""', '"null"', '"{}"', "")
    ] + [
        ((*LISTS, *LLAMA), NOW, ": {}", f": {text}", {}) for text in ("null", "[]")
    ] + [(BEHIND_NAME, NOW, "{}", text, {}) for text in ("null", "[]")
    ] + [
        ([name for name in BEHIND_NAME if name != "mistral"], NOW, "{}", "", {}),
        (ONE_JSON, NOW, "{}}", "", {}),
        (("kimi_k2",), NOW, "<|tool_call_argument_begin|>{}", "", {}),
    ],
    "arguments that are no object": [
        (AS_JSON, READ, json.dumps(READ[1]), text, None)
        for text in ("5", "[1]", "true", '"x"', "{'path': 'a'}", "path=a", 'x "a" y', "'a'")
    ],
    "no arguments": [(ONE_JSON, READ, ', "arguments": ', " oh no", None)],
    "an end marker in wrong arguments": [
        (("hermes",), READ, json.dumps(READ[1]), '"x </tool_call> y"', None),
    ],
    "a line break in a string": [
        (AS_JSON, ("read", PATH), "a.txt", "a\r\n\tb", {"path": "a\r\n\tb"}),
        (ONE_JSON, ("read", PATH), "a.txt", "a \\\nb", {"path": "a \\\nb"}),
        (ONE_JSON, ("read", PATH), json.dumps(PATH), '"{\\"path\\": \\"b\\n\\"}"', {"path": "b\n"}),
        (PYTHON, ("read", PATH), "a.txt", "a\n\tb", {"path": "a\n\tb"}),
        (PYTHON, ("read", PATH), "a.txt", "a\\\\\nb", {"path": "a\\\nb"}),
        (PYTHON, ("read", PATH), "a.txt", "a\\\nb", {"path": "ab"}),
    ],
    "brackets": [
        (ONE_JSON, READ, "}}", "}}}", READ[1]),
        (ONE_JSON, READ, "}}", "}", READ[1]),
        (LISTS, READ, "3}}", "3}}}", READ[1]),
        (LISTS, READ, "3}}", "3}", READ[1]),
        (LLAMA, READ, "}}", "}}}", READ[1]),
        (LLAMA, READ, "3}}", "3]", None),
    ],
    "Python's strings": [
        (PYTHON, run(scale=0.5), "0.5", text, run(scale=value)[1])
        for text, value in [
            ('"""echo "$(date)" > x"""', 'echo "$(date)" > x'), ("'''it's f(a)'''", "it's f(a)"),
            (r"r'a\'\d'", r"a\'\d"), ("r'a\\d\nb'", "a\\d\nb"), ('"""a\nb"""', "a\nb"), ('""', ""),
            ('"a" "b"', "ab"), ('"a"\n    "b"', "ab"), ('"(\\\")"', '(")'), (r'"a\d"', r"a\d"),
        ]
    ],
    "Python's syntax": [
        (PYTHON, READ, "limit=3", text, None)
        for text in ("limit=x()", "limit=1+2j", "limit=", "limit=[1", "limit=3 x=4", '"limit"=3')
    ],
}  # fmt: skip
CASES = [
    pytest.param(name, *case, id=f"{slip} {number}-{name}")
    for slip, cases in SLIPS.items()
    for number, (names, *case) in enumerate(cases)
    for name in names
]


def slipped(name, call, part, slip):
    text = WRITERS[name]([call])
    if part is None:
        part = {"gemma4": '[<|"|>x<|"|>]', "function_gemma": "[<escape>x<escape>]"}[name]
    assert part in text, text
    return text.replace(part, slip, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "call", "part", "slip", "meant"), CASES)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 400)))
def test_a_slip(name, call, part, slip, meant, cuts):
    form, text = FORMATS[name], slipped(name, call, part, slip)
    between = "<|start|>assistant" if name == "harmony" else "\nThen.\n"
    answer = f"{text}{between}{WRITERS[name]([NOW])}"
    said = parse(form, cut(answer, cuts))
    assert said.text == ("" if name == "harmony" else "Then.")
    assert parse(form, text).text == ""
    bad, good = said.calls
    assert (good.name, good.arguments, good.is_whole) == (*NOW, True)
    assert (bad.name, bad.is_whole) == (call[0], meant is not None)
    if meant is not None:
        assert json.loads(bad.text, parse_constant=pytest.fail) == meant
    elif part == json.dumps(call[1]):
        assert bad.text.startswith(slip)


@pytest.mark.parametrize(("name", "call", "part", "slip", "meant"), CASES)
def test_a_slip_that_is_cut_short(name, call, part, slip, meant):
    if meant is not None:
        check_cuts(FORMATS[name], slipped(name, call, part, slip))


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    "written",
    ['cmd=x(), mode="n0 n1", note=n1)', '"ls")', "cmd=/etc/x)", r'cmd="C:\users\a")', 'f("x\ny"))'],
)
def test_a_malformed_call_is_passed_on_as_it_is_written(name, written):
    text = WRITERS[name]([NOW, NOW]).replace("now()", f"run({written}", 1)
    bad, good = check_splits(FORMATS[name], text).calls
    assert (bad.text, bad.is_whole, good.is_whole) == (written, False, True)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_without_the_ends_of_its_calls(name):
    ends = r"<[|｜]tool.call.end[|｜]>|</tool_call>|</\S*invoke>"
    text = re.sub(ends, "", WRITERS[name]([READ, NOW]))
    assert check_splits(FORMATS[name], text).called == [READ, NOW]


@pytest.mark.parametrize("name", MARKED)
def test_an_unknown_tool_between_two_calls_is_text(name):
    """In a list, a section or a program the rest is text too, but no bracket of the first call."""
    said = parse(FORMATS[name], WRITERS[name]([READ, ("erase", PATH), NOW]))
    is_one = name in TOGETHER
    assert said.called == ([READ] if is_one else [READ, NOW])
    assert "erase" in said.text
    assert ("now" in said.text) == is_one
    assert not said.text.startswith(("}", "]", ",", ";"))


def test_a_malformed_call_of_mistral_ends_before_the_next():
    text = "[TOOL_CALLS]run[ARGS]a[TOOL_CALLS]now[ARGS]{}"
    bad, good = check_splits(FORMATS["mistral"], text).calls
    assert (bad.text, bad.is_whole, good.name) == ("a", False, "now")


@pytest.mark.parametrize("name", PYTHON)
def test_what_is_no_call_between_two_calls_is_text(name):
    text = WRITERS[name]([READ, NOW, NOW]).replace("now()", "now.x", 1)
    said = parse(FORMATS[name], text)
    assert said.called == [READ]
    assert said.text.startswith("now.x")
    assert "now()" in said.text
