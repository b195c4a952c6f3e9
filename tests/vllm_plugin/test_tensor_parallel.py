"""Two ranks under real vLLM: what one rank answers, and engines that end when a rank does."""

import json
import os
import re
import signal
import time

import mlx_lm
import pytest
from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams

from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit

# Of one worker: each engine has three processes.
pytestmark = pytest.mark.xdist_group("tensor_parallel")

NUM_TOKENS = 24
PREFIX = tiny.prompts(1, 48, 48, seed=2)[0]
PROMPTS = [PREFIX + p for p in tiny.prompts(5, 1, 30, seed=3)] + tiny.prompts(3, 1, 60, seed=1)
TIGHT = {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 8}
LONG = {"max_position_embeddings": 20_000, "architectures": ["LlamaForCausalLM"]}
# What depends on more than the largest logit.
PARAMS = [
    {"temperature": 0.9, "seed": 1, "logprobs": 2},
    {"temperature": 1.2, "seed": 2, "n": 2, "top_p": 0.9},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"structured_outputs": StructuredOutputsParams(regex="[a-c]{4,8}"), "ignore_eos": False},
]


def load(llm):
    """Greedy tokens by request, and answers of requests with all kinds of parameters."""
    before, outputs = kit.num_preemptions(llm), []
    for _ in range(2):
        outputs.append(kit.generate(llm, PROMPTS, max_tokens=NUM_TOKENS))
    assert kit.prefix_hits(outputs[1]) >= 4 * len(PREFIX)
    assert kit.num_preemptions(llm) > before
    for i, params in enumerate(PARAMS):
        kit.add(llm, str(i), PROMPTS[i], **{"max_tokens": NUM_TOKENS, **params})
    kit.add(llm, "aborted", PROMPTS[0])
    done = kit.run(llm, steps=10)
    llm.llm_engine.abort_request(["aborted"])
    done |= kit.run(llm)
    assert len(done) == len(PARAMS)
    return [kit.tokens(o) for o in outputs], {name: kit.answer(o) for name, o in done.items()}


def check_as_one(found, found_of_one):
    """Check that two ranks answer as one does.

    found, found_of_one: the answers of the same requests by two ranks and by one.
    """
    (greedy, others), (_, others_of_one) = found, found_of_one
    expected = [kit.alone("llama", prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert greedy == [expected, expected]
    for name, (answered, scores) in others.items():
        expected, expected_scores = others_of_one[name]
        assert answered == expected
        assert scores == pytest.approx(expected_scores, abs=1e-4)


def test_two_ranks_answer_as_one():
    """Chunked, mixed, preempted, with shared prefixes, aborted; one step ahead."""
    found = []
    for size in (2, 1):
        with kit.engine("llama", **TIGHT, tensor_parallel_size=size) as llm:
            found.append(load(llm))
    check_as_one(*found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5/tied"])
def test_windows_and_states(name):
    kit.skip_if_vllm_cannot_read(name)
    options = {**TIGHT, "enable_prefix_caching": True, "tensor_parallel_size": 2}
    with kit.engine(name, **options) as llm:
        for _ in range(2):
            outputs = kit.generate(llm, PROMPTS, max_tokens=NUM_TOKENS)
            assert kit.tokens(outputs) == [kit.alone(name, p, NUM_TOKENS) for p in PROMPTS]
        assert kit.prefix_hits(outputs) > len(PREFIX)


def serve(model, options):
    """Print greedy answers; then say when a request is under way, and how it ended."""
    llm = LLM(model, **options)
    outputs = kit.generate(llm, PROMPTS, max_tokens=NUM_TOKENS)
    print("ANSWERS", kit.tokens(outputs), flush=True)
    print("SERVING", flush=True)
    try:
        kit.generate(llm, [[1, 2, 3]], max_tokens=19_000)
    except Exception as e:
        print("ERROR", type(e).__name__, flush=True)


def serving(folder, model, options):
    """An engine in a process of its own, as users have it, with a `log` in the folder."""
    return kit.process(folder / "log", serve, str(model), options)


SERVED = {
    "tensor_parallel_size": 2,
    "max_model_len": 20_000,
    "block_size": 8,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 2_600,
    "max_num_batched_tokens": 64,
    "worker_extension_cls": "tests.vllm_plugin.failing_rank.FailingRank",
}


@pytest.mark.parametrize(
    ("sent", "how"),
    [
        (signal.SIGKILL, r"Worker proc VllmWorker-1 died|connection to a peer was lost"),
        pytest.param(
            None,
            r"The engine ends: rank 1 of 2 fails: RuntimeError: device lost",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_rank_that_dies_or_fails_ends_the_engine(tmp_path, sent, how):
    log, model = tmp_path / "log", tiny.write_folder(tmp_path / "model", "llama", **LONG)
    with serving(tmp_path, model, SERVED) as process:
        wait_for(log, "SERVING", process, 600)
        time.sleep(2)
        pid = pid_of_rank_1(log)
        if sent is None:
            (model / "fail").touch()
        else:
            os.kill(pid, sent)
        wait_for(log, "ERROR EngineDeadError", process, 120)
    assert re.search(how, log.read_text())


def test_two_hosts_answer_as_one_and_end_when_a_rank_hangs(tmp_path):
    """The second host is another vLLM on the loopback."""
    log, log_2 = tmp_path / "log", tmp_path / "log_2"
    model = tiny.write_folder(tmp_path / "model", "llama", **LONG)
    options = SERVED | kit.two_hosts()
    with (
        kit.second_host(model, log_2, **options) as second,
        serving(tmp_path, model, options) as process,
    ):
        wait_for(log, "SERVING", process, 600)
        model_alone = mlx_lm.load(str(model))[0]
        expected = [tiny.alone(model_alone, p, NUM_TOKENS) for p in PROMPTS]
        assert json.loads(re.search(r"ANSWERS (.*)", log.read_text())[1]) == expected
        time.sleep(2)
        pid = pid_of_rank_1(log_2)
        os.kill(pid, signal.SIGSTOP)
        wait_for(log, "ERROR EngineDeadError", process, 120)
        wait_for(log_2, "is killed", second, 120)
        second.join(120)
        assert not second.is_alive()
    said = rf"The engine ends: rank 1 of 2 \(pid {pid} on .* silent"
    assert re.search(said, log.read_text())
    assert re.search(said, log_2.read_text())


def pid_of_rank_1(log):
    return int(re.search(r"rank 1 of 2 has joined \(pid (\d+)\)", log.read_text())[1])


def wait_for(log, text, process, seconds):
    for _ in range(seconds * 10):
        alive = process.is_alive()  # asked first: a process may write the text and end
        if text in log.read_text():
            return
        assert alive, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no {text!r} after {seconds} s: {log.read_text()[-3000:]}")
