"""Bad input of every kind: the project's own error, in one line, in the same words everywhere."""

import json
import resource
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.models import tiny_models as tiny
from tests.support.refusal import Broken, refusal
from tests.support.server.cli_kit import model_folder
from vllm_metal_lite import LLM, AsyncEngine, EngineConfig, LLMEngine, SamplingParams
from vllm_metal_lite.cli.batch import id_of, job_of, read_line, result_line
from vllm_metal_lite.cli.files import OrderedWriter
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.engine import intake
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.rules import rules_of
from vllm_metal_lite.structured_params import StructuredOutputsParams, ThinkingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3)
NAN, INF = float("nan"), float("inf")
FORM = "must be a StructuredOutputsParams or a dict (JSON object)"
STRINGS = "must be a list of non-empty strings"


# The same words everywhere


def test_every_field_has_a_rule():
    kinds = (EngineConfig, SamplingParams, PoolingParams, StructuredOutputsParams, ThinkingParams)
    for kind in kinds:
        assert [f.name for f in fields(kind)] == list(rules_of(kind))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block_size", 16.5, "must be 8, 16 or 32, got 16.5"),
        ("num_blocks", 0, "must be an integer of at least 1, got 0"),
        ("max_num_seqs", 16385, "must be an integer from 1 to 16384, got 16385"),
        ("long_prefill_token_threshold", 5, "must be 0 or at least {} (16), got 5"),
        ("prefill_policy", "never", "must be mixed, alternate or whole, got 'never'"),
        ("memory_fraction", 1.5, "must be a number above 0 and at most 1, got 1.5"),
        ("kv_bits", 5, "must be 8 or 4, got 5"),
        ("seed", "x", "must be an integer of at least 0, got 'x'"),
    ],
)
def test_an_option_is_refused_in_python_as_on_the_command_line(field, value, words, capsys):
    assert refusal(EngineConfig, **{field: value}) == f"{field} {words.format('block_size')}"
    flag = "--" + field.replace("_", "-")
    assert main(["chat", flag, str(value)]) == 2
    assert capsys.readouterr().err == f"error: {flag} {words.format('--block-size')}\n"


@pytest.mark.parametrize(
    ("field", "flag", "value", "words"),
    [
        ("temperature", "--temperature", -1, "must be a number >= 0, got -1"),
        ("temperature", "--temperature", "hot", "must be a number >= 0, got 'hot'"),
        ("temperature", "--temperature", NAN, "must be a number >= 0, got nan"),
        ("top_p", "--top-p", 0, "must be a number above 0 and at most 1, got 0"),
        ("top_k", "--top-k", 1.5, "must be a positive integer, or 0 or -1 for all tokens, got 1.5"),
        ("frequency_penalty", "--frequency-penalty", 3, "must be a number from -2 to 2, got 3"),
        ("max_tokens", "--max-tokens", "", "must be an integer of at least 1, got ''"),
        ("seed", "--sample-seed", 1.5, "must be an integer of 64 bits, got 1.5"),
        ("structured_outputs", None, "yes", f"{FORM} of its fields, got 'yes'"),
        ("stop", None, 0, "must be a non-empty string of valid Unicode, or a list of them, got 0"),
        ("ignore_eos", None, "no", "must be true or false, got 'no'"),
        ("logit_bias", None, [], "must be a dict of token ids to finite numbers, got []"),
        ("bad_words", None, ["\ud800"], rf"{STRINGS} of valid Unicode, got ['\ud800']"),
    ],
)
def test_a_parameter_is_refused_in_python_as_in_a_line_and_as_a_flag(
    field, flag, value, words, capsys
):
    assert refusal(SamplingParams, **{field: value}) == f"{field} {words}"
    line = read_line(json.dumps({"prompt": "x", field: value}).encode())
    assert refusal(job_of, line, 1, {}) == f"{field} {words}"
    if flag is not None:
        assert main(["chat", flag, str(value)]) == 2
        assert capsys.readouterr().err == f"error: {flag} {words}\n"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("thinking", {"start": [1]}, "thinking must be a ThinkingParams or a dict (JSON obj"),
        ("thinking", {"start": [1], "end": []}, "thinking.end must be a list of at least one"),
        ("thinking", {"stop": [1]}, "thinking has no field 'stop'; it has start, end, "),
        ("structured_outputs", {"json": {1, 2}}, "structured_outputs.json must be a JSON schema"),
        ("structured_outputs", {"json": {"a": {1}}}, "structured_outputs.json cannot be written"),
    ],
)
def test_a_bad_record_within_the_parameters_is_named_by_its_field(field, value, message):
    assert refusal(SamplingParams, **{field: value}).startswith(message)


def test_errors_after_loading_name_flags_too(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "x" * 40}) + "\n")
    argv = ["generate", str(source), "-o", str(target), "--model", str(model_folder())]
    assert main([*argv, "--num-blocks", "2", "--max-model-len", "33"]) == 1
    assert "error: --max-model-len must be at most the 32 tokens" in capsys.readouterr().err
    assert main([*argv, "--max-model-len", "33"]) == 1
    assert "--max-model-len (33) leaves room for 32" in target.read_text()
    with pytest.raises(ConfigError, match=r"^max_model_len must be at most the 32 tokens"):
        LLM(str(model_folder()), num_blocks=2, max_model_len=33)


def test_a_value_that_spells_a_field_is_quoted_as_it_is(capsys):
    assert main(["chat", "--dtype", "dtype"]) == 2
    assert capsys.readouterr().err.endswith("got 'dtype'\n")


# Calls


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(model_folder()), num_blocks=32, max_num_seqs=2, max_model_len=128)


MESSAGE = {"role": "user", "content": "hi"}
BAD_CALLS = {
    "a scalar array": lambda llm: llm.generate(np.array(5)),
    "bytes": lambda llm: llm.generate(b"x"),
    "a dict with text that is none": lambda llm: llm.generate({"prompt": ["a"]}),
    "a dict with ids that are none": lambda llm: llm.generate({"prompt_token_ids": "ab"}),
    "a prompt without a repr": lambda llm: llm.generate([Broken()]),
    "half a surrogate pair": lambda llm: llm.generate(["good", "\ud800"]),
    "parameters in a dict, empty": lambda llm: llm.generate("x", {}),
    "parameters 0": lambda llm: llm.generate("x", 0),
    "a priority that is a bool": lambda llm: llm.generate("x", priority=True),
    "a list of parameters too long": lambda llm: llm.generate("x", [GREEDY] * 2),
    "a message alone": lambda llm: llm.chat(MESSAGE),
    "a message without a role": lambda llm: llm.chat([{"content": "hi"}]),
    "no messages": lambda llm: llm.chat(None),
    "messages that are text": lambda llm: llm.chat("hi"),
    "a conversation among messages": lambda llm: llm.chat([MESSAGE, [MESSAGE]]),
    "an empty conversation": lambda llm: llm.chat([[MESSAGE], []]),
    "half a surrogate pair in a message": lambda llm: llm.chat([{**MESSAGE, "content": "\ud800"}]),
    "template options that are none": lambda llm: llm.chat([MESSAGE], chat_template_kwargs=5),
    "template options 0": lambda llm: llm.chat([MESSAGE], chat_template_kwargs=0),
    "template options by number": lambda llm: llm.chat([MESSAGE], chat_template_kwargs={1: 2}),
    "text from the template": lambda llm: llm.chat(
        [MESSAGE], chat_template_kwargs={"tokenize": False}
    ),
    "add_generation_prompt as text": lambda llm: llm.chat([MESSAGE], add_generation_prompt="no"),
    "a request id that is long": lambda llm: llm.engine.add_request("a\nb" * 999, [1] * 200),
    "abort of no id": lambda llm: llm.engine.abort(None),
    "abort of a list": lambda llm: llm.engine.abort([["a"]]),
    "options in a dict": lambda llm: LLMEngine.from_name("demo", {}),
    "another engine": lambda llm: AsyncEngine(llm),
}


@pytest.mark.parametrize("fault", BAD_CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(llm, fault):
    before = tiny.counts(llm.engine)
    refusal(BAD_CALLS[fault], llm)
    assert tiny.counts(llm.engine) == before
    assert llm.generate("good", GREEDY)[0].finished


def test_a_request_that_cannot_be_added_leaves_nothing(llm, monkeypatch):
    before = tiny.counts(llm.engine)
    monkeypatch.setattr(intake, "Answer", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        llm.engine.add_request("a", "x", GREEDY)
    assert tiny.counts(llm.engine) == before


NO_MODELS = [None, 5, b"demo", ["demo"], "~nosuchuser/x", "a\0b", "\ud800", "a\nb"]
NO_MODELS += ["x" * 5000, "a/" * 3000, "x" * 300 + "/y", Path("x" * 5000)]


@pytest.mark.parametrize("name", NO_MODELS, ids=lambda name: ascii(name)[:20])
def test_what_cannot_be_the_name_of_a_model(name, capsys):
    refusal(LLM, name)
    # Only ASCII names: capsys's stderr cannot encode the others, a real stderr can.
    if isinstance(name, str) and name.isascii():
        assert main(["generate", "/dev/null", "--model", name]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a\0b", "\udcff/x", ""], ids=lambda name: ascii(name)[:9]
)
def test_what_cannot_be_the_name_of_a_file(name, capsys):
    assert main(["generate", name]) == 2
    assert main(["generate", "/dev/null", "-o", name]) == 2
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == ["error: "] * 2


# Lines


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "true", "[1]", '"\\ud800"'])
def test_an_id_that_cannot_come_back_is_refused(value):
    message = refusal(id_of, read_line(f'{{"id": {value}}}'.encode())["id"], 7)
    assert message.startswith("id must be a string of valid Unicode or a finite number, got")


def test_log_probabilities_of_nothing_are_null():
    job = job_of({"prompt": "x"}, 1, {})
    out = CompletionOutput(0, "", [5], -INF, [{5: Logprob(-INF), 6: Logprob(-0.5)}], "length")
    result = result_line(job, RequestOutput("1", "x", [1], [out]))
    assert (result["cumulative_logprob"], result["logprobs"]) == (None, [{"5": None, "6": -0.5}])


@pytest.mark.parametrize("room", [250, 300])
def test_a_full_disk_leaves_whole_lines_in_order(tmp_path, room):
    path = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = OrderedWriter(str(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        writer.put(0, {"id": "é" * 40})
        writer.put(2, {"id": 2})
        refusal(writer.put, 1, {"id": "x" * 300})
        writer.put(3, {"id": 3})  # would fit, and would not be in order
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == json.dumps({"id": "é" * 40}, ensure_ascii=False) + "\n"
    assert writer.num_written == 1


# Folders


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"model_type": ' + "9" * 5000 + "}"], ids=["deep", "many digits"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_python_cannot_read(tmp_path, name, text):
    tiny.write_folder(tmp_path)
    (tmp_path / name).write_text(text)
    assert str(tmp_path) in refusal(LLM, str(tmp_path), num_blocks=8)
