"""The offline API over a model folder whose tokens are single characters."""

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from tests.support.engine.sampling import log_softmax
from tests.support.models import tiny_models as tiny
from tests.support.run_python import run_python
from vllm_metal_lite import LLM, AsyncEngine, SamplingParams
from vllm_metal_lite.engine import describe
from vllm_metal_lite.engine.detokenizer import Detokenizer
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.model.files.find import DEMO_PATH

# Tokens beyond the tokenizer's vocabulary are the model's padding, and decode to nothing.
DECODED = dict(enumerate([*tiny.CHARACTERS, "</s>", "<s>"]))
OPTIONS = {"num_blocks": 64, "block_size": 8, "max_model_len": 256, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def native(folder):
    return tiny.build(tiny.config_of("llama", eos_token_id=tiny.EOS))


def encode(text: str) -> list[int]:
    return [tiny.CHARACTERS.index(c) for c in text]


def decode(tokens: list[int]) -> str:
    return "".join(tiny.CHARACTERS[t] if t < tiny.EOS else "" for t in tokens)


def greedy(max_tokens: int = 12, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def one(llm: LLM, prompt, params: SamplingParams):
    (output,) = llm.generate(prompt, params)
    return output.outputs[0]


@pytest.fixture
def story(llm, native) -> tuple[str, list[int]]:
    """A prompt, and the greedy tokens with which mlx-lm continues: 60 of them, varied."""
    prompt = "Once upon a time"
    tokens = tiny.alone(native, encode(prompt), 60)
    assert len(set(tokens)) > 10
    return prompt, tokens


# What a prompt may be


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: "Hello there",
        lambda ids: ["Hello there"],
        lambda ids: {"prompt": "Hello there"},
        lambda ids: [{"prompt": "Hello there"}],
        lambda ids: {"prompt_token_ids": ids},
        lambda ids: [{"prompt_token_ids": np.array(ids)}],
        lambda ids: ids,
        lambda ids: tuple(ids),
        lambda ids: np.array(ids),
        lambda ids: [ids],
    ],
)
def test_every_form_of_a_prompt(llm, native, form):
    ids = encode("Hello there")
    (output,) = llm.generate(form(ids), greedy(6))
    expected = tiny.alone(native, ids, 6)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == decode(expected)
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


def test_many_prompts_come_back_in_order_with_their_own_parameters(llm, native):
    prompts = ["a long prompt, " * 6, "b", {"prompt_token_ids": encode("cc")}]
    outputs = llm.generate(prompts, [greedy(3), greedy(9), greedy(1)])
    texts = [o.outputs[0].token_ids for o in outputs]
    ids = [encode(prompts[0]), encode("b"), encode("cc")]
    assert texts == [tiny.alone(native, p, n) for p, n in zip(ids, (3, 9, 1), strict=True)]
    assert [o.prompt for o in outputs] == [prompts[0], "b", None]
    assert llm.generate([]) == []


def test_a_role_that_the_template_does_not_name_is_refused(llm, monkeypatch):
    """Most templates leave its messages out."""
    messages = [{"role": "critic", "content": "no"}, {"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="must be one of system, user, assistant, tool, got 'cr"):
        llm.chat(messages)
    template = "{% for m in messages if m.role in ['critic'] %}{{ m.content }}{% endfor %}"
    for source in template, {"default": template}:
        monkeypatch.setattr(llm.get_tokenizer()._tokenizer, "chat_template", source)
        assert llm.chat(messages, greedy(1))[0].prompt_token_ids == encode("no")


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, greedy(2))
    assert decode(output.prompt_token_ids) == "u:hi a:"
    assert llm.engine.render_turn(messages)[1] == ()  # this model needs no checkpoints
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "yo"}]], greedy(2))
    assert [decode(o.prompt_token_ids) for o in two] == ["u:hi a:", "u:hi a:yo a:"]


def test_parameters_and_priorities_must_match_the_prompts(llm):
    for how in ({"sampling_params": [greedy()]}, {"priority": [1]}):
        with pytest.raises(RequestError, match="for 2 prompts"):
            llm.generate(["a", "b"], **how)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "other": 1},
            SamplingParams(temperature=0.6, top_k=20),
        ),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0)),
        (
            {"repetition_penalty": 1.1, "presence_penalty": 1.5},
            SamplingParams(repetition_penalty=1.1, presence_penalty=1.5),
        ),
    ],
)
def test_what_a_model_asks_for_holds_without_parameters(folder, tmp_path, config, wanted):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    chats = [[{"role": "user", "content": "hi"}]]
    llm, given = LLM(str(tmp_path), **OPTIONS), LLM(str(folder), **OPTIONS)
    assert llm.get_default_sampling_params() == wanted
    for answers, expected in (
        (llm.generate(["Once"]), given.generate(["Once"], wanted)),
        (llm.chat(chats), given.chat(chats, [wanted])),
    ):
        assert answers[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_one_bad_prompt_is_named_and_leaves_nothing_behind(llm):
    with pytest.raises(RequestError, match=r"prompt 1: .*empty"):
        llm.generate(["fine", ""], greedy())
    assert not llm.engine.has_unfinished_requests()
    assert llm.metrics()["blocks_owned"] == llm.metrics()["requests_waiting"] == 0


# Where an answer ends


def test_stop_string_within_one_token_and_over_several(llm, story):
    prompt, tokens = story
    text = decode(tokens)
    for length in (1, 3, 7):
        stop = text[20 : 20 + length]
        at = text.index(stop)
        out = one(llm, prompt, greedy(60, stop=stop))
        assert (out.text, out.finish_reason, out.stop_reason) == (text[:at], "stop", stop)
        kept = one(llm, prompt, greedy(60, stop=["\n", stop], include_stop_str_in_output=True))
        assert kept.text == text[: at + length]
        assert kept.token_ids == out.token_ids == tokens[: at + length]


def test_the_first_of_several_stop_strings_wins(llm, story):
    prompt, tokens = story
    text = decode(tokens)
    stops = [text[30:33], text[12:16], text[40:41]]
    first = min(stops, key=lambda s: text.index(s) + len(s))
    out = one(llm, prompt, greedy(60, stop=stops))
    assert out.stop_reason == first
    assert out.text == text[: text.index(first)]


def test_a_stop_string_within_min_tokens_is_passed_over_beside_a_longer_one(llm, story):
    prompt, tokens = story
    text = decode(tokens[:12])
    stops = [text[-3:], text[-3:] + "\0never" * 9]
    out = one(llm, prompt, greedy(20, stop=stops, min_tokens=13))
    assert len(out.token_ids) > 13
    assert out.text.startswith(text)


def test_a_stop_string_that_never_completes_is_shown_in_the_end(llm, story):
    prompt, tokens = story
    text = decode(tokens[:12])
    assert one(llm, prompt, greedy(12, stop=text[-3:] + "\0never")).text == text


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"min_tokens": 2}])
def test_a_stop_string_that_the_stream_holds_back_is_found_in_the_end(llm, limits):
    """A lone space is shown with the next token, or when the answer ends."""
    space = tiny.CHARACTERS.index(" ")
    limits = limits | {"allowed_token_ids": [space, tiny.EOS], "stop_token_ids": [tiny.EOS]}
    bias = {tiny.EOS: 1000.0 if "min_tokens" in limits else -1000.0}
    out = one(llm, "abc", SamplingParams(temperature=0, stop=" ", logit_bias=bias, **limits))
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", " ")
    assert out.num_shown_tokens is None


def test_text_on_the_way_never_shows_a_part_of_a_stop_string(llm, story):
    prompt, tokens = story
    text = decode(tokens)
    stop = text[3:11]
    at = text.index(stop)
    llm.engine.add_request("s", prompt, greedy(60, stop=stop))
    seen = [""]
    while llm.engine.has_unfinished_requests():
        seen += [o.outputs[0].text for o in llm.engine.step()]
    assert seen[-1] == text[:at]
    assert all(text[:at].startswith(s) for s in seen), "something was shown and taken back"
    assert [len(s) for s in seen] == sorted(len(s) for s in seen)


def test_a_stop_token_ends_the_answer_and_is_not_shown(llm, story):
    prompt, tokens = story
    token = max(tokens, key=tokens.index)  # the token that first appears latest
    at = tokens.index(token)
    assert at > 20
    out = one(llm, prompt, greedy(60, stop_token_ids=[token]))
    assert out.token_ids == tokens[: at + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", token)
    assert out.text == decode(tokens[:at])
    kept = one(llm, prompt, greedy(60, stop_token_ids=[token], include_stop_str_in_output=True))
    assert kept.text == decode(tokens[: at + 1])


def test_end_of_sequence_and_ignoring_it(llm):
    bias = {tiny.EOS: 1000.0}
    out = one(llm, "abc", SamplingParams(temperature=0, logit_bias=bias, max_tokens=5))
    assert out.token_ids == [tiny.EOS]
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", None)
    out = one(llm, "abc", greedy(5, logit_bias=bias))
    assert out.token_ids == [tiny.EOS] * 5
    assert (out.text, out.finish_reason) == ("", "length")
    shown = one(llm, "abc", greedy(2, logit_bias=bias, skip_special_tokens=False))
    assert shown.text == "</s></s>"


def test_min_tokens_holds_off_every_kind_of_end(llm, story):
    prompt, tokens = story
    bias = {tiny.EOS: 1000.0}
    params = SamplingParams(temperature=0, logit_bias=bias, max_tokens=20, min_tokens=6)
    out = one(llm, prompt, params)
    assert len(out.token_ids) == 7
    assert out.token_ids[6] == tiny.EOS
    assert tiny.EOS not in out.token_ids[:6]
    stop = decode(tokens)[2:5]  # complete with the fifth token
    assert decode(tokens[:20]).count(stop) == 1
    assert len(one(llm, prompt, greedy(20, stop=stop, min_tokens=5)).token_ids) == 5
    assert len(one(llm, prompt, greedy(20, stop=stop, min_tokens=6)).token_ids) == 20


def test_max_tokens_none_runs_to_the_end_of_the_context(llm, native):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    out = one(llm, "x" * 200, params)
    assert len(out.token_ids) == 56
    assert out.token_ids == tiny.alone(native, encode("x" * 200), 56)


# Log-probabilities, biases, penalties


def check_logprobs(entry: dict, expected: np.ndarray, token: int, k: int) -> None:
    best = np.argsort(-expected, kind="stable")
    assert next(iter(entry)) == token
    assert set(entry) == {token, *best[:k].tolist()}
    for t, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[t], abs=1e-4)
        assert best[logprob.rank - 1] == t
        assert logprob.decoded_token == DECODED.get(t, "")


@pytest.mark.parametrize("budget", [7, 256])
@pytest.mark.parametrize("neighbours", [0, 5])
def test_logprobs_are_the_models_own(folder, native, budget, neighbours):
    """The prompt is computed at once or in chunks, alone or preempted by neighbours."""
    options = {**OPTIONS, "num_blocks": 12, "max_model_len": 96}
    llm = LLM(str(folder), **{**options, "max_num_batched_tokens": budget})
    prompt = encode("The quick brown fox jumps over the dog")
    params = greedy(30, logprobs=3, prompt_logprobs=2)
    others = [encode("n" * (9 + i)) for i in range(neighbours)]
    how = [params, *[greedy(40, logprobs=5, prompt_logprobs=0)] * neighbours]
    output = llm.generate([prompt, *others], how, priority=[1] + [0] * neighbours)[0]
    assert (llm.metrics()["preemptions"] > 0) == (neighbours > 0)
    answer = output.outputs[0]
    expected = log_softmax(tiny.logits_alone(native, prompt + answer.token_ids))
    assert answer.token_ids == tiny.alone(native, prompt, 30)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        check_logprobs(entry, expected[i - 1], prompt[i], 2)
    assert len(answer.logprobs) == 30
    for i, (entry, token) in enumerate(zip(answer.logprobs, answer.token_ids, strict=True)):
        check_logprobs(entry, expected[len(prompt) + i - 1], token, 3)
    total = sum(e[t].logprob for e, t in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_logprobs_are_taken_before_bias_and_temperature(llm, native):
    prompt = encode("abc")
    expected = log_softmax(tiny.logits_alone(native, prompt))[-1]
    worst = int(expected.argmin())
    out = one(llm, prompt, greedy(1, logit_bias={worst: 100.0}, logprobs=0))
    assert out.token_ids == [worst]
    assert out.logprobs[0][worst].logprob == pytest.approx(expected[worst], abs=1e-4)
    assert out.logprobs[0][worst].rank == tiny.VOCAB
    assert one(llm, prompt, greedy(1)).logprobs is None
    assert one(llm, prompt, greedy(1)).cumulative_logprob is None


def test_penalties_follow_their_definition(llm, native):
    """The oracle is a greedy loop over mlx-lm's logits."""
    prompt = encode("to be or not to be")
    out = one(
        llm, prompt, greedy(20, frequency_penalty=1.5, presence_penalty=0.7, repetition_penalty=1.3)
    )
    tokens: list[int] = []
    for _ in range(20):
        x = tiny.logits_alone(native, prompt + tokens)[-1].astype(np.float64)
        seen = sorted({*prompt, *tokens})
        x[seen] = np.where(x[seen] > 0, x[seen] / 1.3, x[seen] * 1.3)
        for t in set(tokens):
            x[t] -= 1.5 * tokens.count(t) + 0.7
        tokens.append(int(x.argmax()))
    assert out.token_ids == tokens
    assert out.token_ids != tiny.alone(native, prompt, 20)


# Text


def test_the_detokenizer_holds_back_what_may_be_a_stop_string_even_at_the_start(llm):
    tokens: list[int] = []
    stream = Detokenizer(llm.get_tokenizer(), SamplingParams(stop="abcdef"), tokens, [0])
    shown = []
    for token in encode("abcdeX"):
        tokens.append(token)
        assert stream.find_stop() is None
        shown.append(stream.shown)
    assert shown == ["", "", "", "", "", "a"]
    stream.end_at(len(tokens))
    assert stream.text() == "abcdeX"


def test_an_answer_keeps_its_first_space():
    tokenizer = load_tokenizer(DEMO_PATH)
    ids = tokenizer.encode("the red box is 4821")
    for cut in range(1, len(ids)):
        stream = Detokenizer(tokenizer, SamplingParams(), ids[cut:], ids[:cut])
        stream.end_at(len(ids) - cut)
        assert tokenizer.decode(ids[:cut]) + stream.text() == "the red box is 4821"


def test_tokens_outside_the_tokenizer_are_silent(llm):
    bias = {tiny.VOCAB - 1: 1000.0}
    out = one(llm, "abc", greedy(3, logit_bias=bias, logprobs=2, stop="zz"))
    assert out.token_ids == [tiny.VOCAB - 1] * 3
    assert out.text == ""


# Checkpoints


def test_conversations_fork_behind_their_system_prompt(tmp_path):
    """A recurrent model starts from checkpoints only, so `chat` names where conversations part."""
    folder = tiny.write_folder(tmp_path / "hybrid", "qwen3_next")
    llm = LLM(str(folder), num_blocks=64, block_size=8, max_num_batched_tokens=64)
    system = {"role": "system", "content": "one two three " * 4}
    greedy = SamplingParams(temperature=0, max_tokens=4)
    first, other = (
        llm.chat([system, {"role": "user", "content": text}], greedy)[0]
        for text in ("Who are you?", "And then?")
    )
    assert first.num_cached_tokens == 0
    prompt, _ = llm.engine.render_turn([system], add_generation_prompt=False)
    shared = len(prompt["prompt_token_ids"])
    assert other.num_cached_tokens >= shared - 8


def test_prompts_fork_at_checkpoints_that_the_caller_names(tmp_path):
    llm = LLM(str(tiny.write_folder(tmp_path / "hybrid", "qwen3_next")), **OPTIONS)
    stem, other = "A system prompt; ", "Nothing in common"
    forks = [stem + text for text in ("one thing", "another", "and a third")]
    llm.generate(forks[0], greedy(2), checkpoints=[16])
    llm.generate([other, forks[1]], greedy(2), checkpoints=[[], [16]])
    assert llm.generate(forks[2], greedy(2))[0].num_cached_tokens == 16
    llm.reset_prefix_cache()
    assert llm.generate(forks[2], greedy(2))[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        (5, "must be a list of numbers of tokens, got 5"),
        ("ab", "must be a list of numbers of tokens, got 'ab'"),
        ([True], "must be integers, got True"),
        (["1"], "must be integers, got '1'"),
        ([0], "checkpoint 0 is outside the prompt of 2 tokens"),
        ([1, 3], "checkpoint 3 is outside the prompt of 2 tokens"),
        ([[1], [-1]], "prompt 1: checkpoint -1 is outside the prompt of 3 tokens"),
        ([[1], 2], "prompt 1: checkpoints must be a list"),
        ([[1]], "1 checkpoints for 2 prompts"),
    ],
)
def test_bad_checkpoints_are_refused(llm, checkpoints, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(["ab", "abc"], greedy(1), checkpoints=checkpoints)
    assert not llm.engine.has_unfinished_requests()


def test_checkpoints_in_any_order_or_twice_are_fine(llm):
    llm.generate("abc", greedy(1), checkpoints=[3, 1, 3])
    llm.generate("abc", greedy(1), checkpoints=(np.int64(2),))


def test_a_count_that_rounds_to_the_next_unit():
    counts = 999_885_952, 999_400_000, 999
    assert list(map(describe._count, counts)) == ["1B", "999M", "999"]


def test_a_thread_that_comes_while_another_one_generates_is_refused_by_the_rule(llm, story):
    """Both would step the engine, and each would get the other's answers."""
    prompt, tokens = story
    inside, release = threading.Event(), threading.Event()

    def hold(output):
        inside.set()
        assert release.wait(60)

    def counts():  # without the bytes of arrays, which Python may collect at any time
        return {k: v for k, v in llm.metrics().items() if not k.startswith("memory_")}

    llm.engine.on_step = hold
    with ThreadPoolExecutor(1) as others, ExitStack() as at_the_end:
        at_the_end.callback(release.set)
        at_the_end.callback(setattr, llm.engine, "on_step", None)
        first = others.submit(llm.generate, prompt, greedy(20))
        assert inside.wait(60)
        before = counts()
        calls = [
            lambda: llm.generate("b", greedy()),
            lambda: llm.chat([{"role": "user", "content": "b"}], greedy()),
            lambda: llm.embed("b"),
            lambda: llm.score("a", "b"),
            llm.reset_prefix_cache,
        ]
        for call in calls:
            with pytest.raises(RequestError, match="another thread is using this LLM"):
                call()
        assert counts() == before
        at_the_end.close()
        assert first.result()[0].outputs[0].token_ids == tokens[:20]
    assert one(llm, prompt, greedy(20)).token_ids == tokens[:20]


def test_an_engine_that_serves_coroutines_is_no_llm_s_until_it_is_shut_down(llm, story):
    prompt, tokens = story
    served = AsyncEngine(llm.engine)
    try:
        asyncio.run(served.metrics())  # its thread has begun
        with pytest.raises(RequestError, match="another thread is using this LLM"):
            llm.generate(prompt, greedy())
    finally:
        served.shutdown()
    assert one(llm, prompt, greedy()).token_ids == tokens[:12]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("call", ["llm.generate('a')", "LLM('demo')", "asyncio.run(ask())"])
def test_a_forked_child_is_refused_by_the_rule(call):
    """MLX hangs there.  The test uses a process of its own, because pytest has threads."""
    text = f"""
import asyncio, os, signal
from vllm_metal_lite import LLM, AsyncEngine
llm = LLM("demo", num_blocks=16, max_model_len=64)
llm.generate("a")
served = AsyncEngine(LLM("demo", num_blocks=16, max_model_len=64).engine)
async def ask():
    async for output in served.generate("a"):
        pass
if not os.fork():
    signal.alarm(20)
    try:
        {call}
    except ValueError as e:
        print(e, flush=True)
    os._exit(0)
os.wait()
os._exit(0)
"""
    assert "MLX does not survive a fork" in run_python("-c", text).stdout
