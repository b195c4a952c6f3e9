"""Harmony, with OpenAI's own package as the oracle: it writes and reads the same."""

import base64

import pytest

from tests.support.chat.real_parts import package
from tests.support.chat.real_tokenizers import o200k, tokenizer_folder
from tests.support.chat.text import TOOLS, check_cuts, check_splits, parse
from vllm_metal_lite.chat_formats.detect import FORMATS

HARMONY = FORMATS["harmony"]
CALL = '{"path": "ä b.txt"}'
ANSWERS = {
    "recipient behind the channel": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.read <|constrain|>json<|message|>{CALL}<|call|>"
    ),
    "recipient before the channel": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.read"
        f"<|channel|>commentary <|constrain|>json<|message|>{CALL}<|call|>"
    ),
    "recipient first": f" to=functions.read<|channel|>commentary json<|message|>{CALL}<|call|>",
    "in the channel of thoughts": (
        f"<|channel|>analysis to=functions.read code<|message|>{CALL}<|call|>"
    ),
    "text before": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.read <|constrain|>json<|message|>{CALL}<|call|>"
    ),
    "final": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Yes, <b>.<|return|>",
}
ALL = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """OpenAI's package, with the vocabulary that it would download; it checks the file's hash."""
    folder = tmp_path_factory.mktemp("o200k")
    lines = sorted((rank, token) for token, rank in o200k()[0].items())
    with (folder / "o200k_base.tiktoken").open("wb") as file:
        file.writelines(base64.b64encode(token) + b" %d\n" % rank for rank, token in lines)
    path = str(package("openai-harmony", "0.0.8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        patch.syspath_prepend(path)
        yield pytest.importorskip("openai_harmony")


@pytest.fixture(scope="module")
def encoding(harmony):
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@ALL
def test_an_answer_is_read_as_by_openai(harmony, encoding, answer):
    token_ids = encoding.encode(answer, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(token_ids, harmony.Role.ASSISTANT)
    found = {"text": "", "reasoning": "", "calls": []}
    for message in messages:
        if message.recipient is not None:
            name = message.recipient.removeprefix("functions.")
            found["calls"].append((name, message.content[0].text))
        else:
            kind = "reasoning" if message.channel == "analysis" else "text"
            found[kind] += message.content[0].text
    said = check_splits(HARMONY, answer)
    calls = [(call.name, call.text) for call in said.calls]
    assert {"text": said.text, "reasoning": said.reasoning, "calls": calls} == found


@ALL
def test_an_answer_that_is_cut_short(answer):
    check_cuts(HARMONY, answer)
    header = answer.rindex("<|message|>")
    for at in range(answer.rfind("<|start|>", 0, header) + 12, header):
        assert parse(HARMONY, answer[:at]).text in ("", "I look.")


def test_a_header_without_a_message_is_dropped():
    bad = "<|channel|>analysis<|end|><|start|>assistant"
    said = check_splits(HARMONY, f"{bad}<|channel|>final<|message|>Yes.")
    assert (said.text, said.reasoning) == ("Yes.", "")


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "others"])
@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "final"])
def test_a_call_of_an_unknown_tool_shows_its_body(name, tools):
    said = check_splits(HARMONY, ANSWERS[name].replace(".read", ".erase"), tools=tools)
    assert said.text == ("I look.\n" if name == "text before" else "") + CALL
    assert said.calls == []


@pytest.mark.parametrize("text", [" ", " t", " to", " today", "to=x"])
def test_text_that_begins_as_a_recipient(text):
    assert check_splits(HARMONY, text).text == text


@pytest.mark.long
def test_the_tokenizer_is_that_of_gpt_oss(encoding, tmp_path):
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(tokenizer_folder(tmp_path, "gpt-oss"))
    for text in [*ANSWERS.values(), "Hello WÖRLD's 12345\n\n  naïve 🦙 日本語", "\tx\r\n\r\n y "]:
        ours = tokenizer.encode(text, add_special_tokens=False)
        assert ours == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(ours) == text
