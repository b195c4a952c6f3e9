"""Embeddings and scores equal those of mlx-lm's module for each prompt alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from metal.host import installed
from tests.support.engine.embeddings import alone, compare
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLM, PoolingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.pooling import resolved, truncate
from vllm_metal_lite.engine.scoring import plan_scores
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.model.files.pooling_config import PoolingConfig, only_pools, pooling_config

PROMPTS = tiny.prompts(7, 1, 60, seed=5)
OPTIONS = {"num_blocks": 64, "block_size": 8, "max_model_len": 256, "max_num_batched_tokens": 64}


def together(engine, prompts, params=None, prefix: str = "") -> list[np.ndarray]:
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{i}", prompt, params or PoolingParams())
    done = tiny.run(engine)
    return [done[f"{prefix}{i}"].pooled for i in range(len(prompts))]


def all_alone(name: str, prompts, pooling: str = "last") -> list[np.ndarray]:
    """The embeddings that `together` must give."""
    return [alone(tiny.native(name), prompt, pooling) for prompt in prompts]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "llama/window", "gemma2", "mixtral", "qwen3_next", "mamba2"]
)
def test_embeddings_in_chunks_equal_those_of_the_model_alone(name, pooling):
    engine = tiny.engine(name, max_num_batched_tokens=24, max_num_seqs=4)
    found = together(engine, PROMPTS, PoolingParams(pooling=pooling))
    compare(found, all_alone(name, PROMPTS, pooling))
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_prompts_of_one_token():
    """If all rows of a step have logits, the step lists none."""
    for prompts in [[[5]], [[5], [6], [7]]]:
        compare(together(tiny.engine(), prompts), all_alone("llama", prompts))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_cached_prefix_changes_nothing(pooling):
    stem = tiny.prompts(1, 40, 40, seed=9)[0]
    prompts = [stem + tail for tail in ([1], [2, 3], [4] * 9, [])]
    engine, params = tiny.engine(max_num_batched_tokens=24), PoolingParams(pooling=pooling)
    for _ in range(2):
        compare(together(engine, prompts, params), all_alone("llama", prompts, pooling))
    assert (engine.metrics()["prefix_cache_hit_tokens"] > 0) == (pooling == "last")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_beside_decodes_and_preempted(pooling, speculate):
    """The tokens of the others stay as they are, and so do the embeddings."""
    engine = tiny.engine(
        num_blocks=13, max_model_len=100, max_num_batched_tokens=16, speculate=speculate
    )
    chats = tiny.prompts(4, 5, 30, seed=7)
    tiny.submit(engine, chats, 40)
    done = {}
    for i, prompt in enumerate(PROMPTS):
        # The last chats are preempted for requests of a higher priority.
        params = PoolingParams(pooling=pooling)
        engine.add_request(f"e{i}", prompt, params, priority=i % 3 - 1)
        done |= tiny.step(engine)
    done |= tiny.run(engine)
    assert tiny.tokens_of(done[i] for i in "0123") == tiny.all_alone("llama", chats, 40)
    found = [done[f"e{i}"].pooled for i in range(len(PROMPTS))]
    compare(found, all_alone("llama", PROMPTS, pooling))
    assert engine.metrics()["preemptions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next"])
def test_through_host_kernels(name):
    """Steps of decodes are compiled there; steps with embeddings are not."""
    chats = tiny.prompts(2, 2, 20, seed=9)
    with installed():
        engine = tiny.engine_with_kernels(name, max_num_batched_tokens=24)
        tiny.submit(engine, chats, 16)
        modes = [("last", "mean")[i % 2] for i in range(len(PROMPTS))]
        for i, (prompt, mode) in enumerate(zip(PROMPTS, modes, strict=True)):
            engine.add_request(f"e{i}", prompt, PoolingParams(pooling=mode))
        done = tiny.run(engine)
        assert engine.runner.path.uses_kernels
    assert tiny.tokens_of(done[i] for i in "01") == tiny.all_alone(name, chats, 16)
    for i, (prompt, mode) in enumerate(zip(PROMPTS, modes, strict=True)):
        compare([done[f"e{i}"].pooled], all_alone(name, [prompt], mode))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bits(dtype):
    """The oracle is the same weights in float32 arithmetic."""
    engine = tiny.engine("qwen3", dtype, max_num_batched_tokens=24)
    model = tiny.build(tiny.config_of("qwen3"))
    model.set_dtype(dtype)
    model.set_dtype(mx.float32)
    for mode in ("last", "mean"):
        found = together(engine, PROMPTS, PoolingParams(pooling=mode), mode)
        for one, prompt in zip(found, PROMPTS, strict=True):
            assert one @ alone(model, prompt, mode) > 0.999


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_may_fill_the_context(pooling):
    """The prompts are computed in chunks beside a decode.  One token more is refused."""
    engine = tiny.engine(max_model_len=64, num_blocks=16, max_num_batched_tokens=24)
    prompts = tiny.prompts(3, 64, 64, seed=11)
    params = PoolingParams(pooling=pooling)
    tiny.submit(engine, [[1, 2, 3]], 30)
    compare(together(engine, prompts, params, "e"), all_alone("llama", prompts, pooling))
    with pytest.raises(RequestError, match=r"65 tokens; max_model_len \(64\) leaves room for 64$"):
        engine.add_request("x", [1] * 65, params)


def test_a_step_of_embeddings_samples_nothing():
    engine = tiny.engine()
    engine.runner.sampler = SimpleNamespace(state=None)  # nothing to call
    together(engine, PROMPTS)


def test_a_mean_starts_again_after_a_preemption():
    engine, params = tiny.engine(max_num_batched_tokens=16), PoolingParams(pooling="mean")
    prompt = tiny.prompts(1, 60, 60)[0]
    engine.add_request("a", prompt, params)
    engine.step()
    engine.in_flight.rollback()
    compare([tiny.run(engine)["a"].pooled], all_alone("llama", [prompt], "mean"))


def test_aborted_requests_leave_nothing():
    engine = tiny.engine(max_num_batched_tokens=16)
    tiny.submit(engine, PROMPTS, PoolingParams(pooling="mean"))
    engine.step()
    engine.abort(map(str, range(1, len(PROMPTS))))
    compare([tiny.run(engine)["0"].pooled], all_alone("llama", PROMPTS[:1], "mean"))
    assert not engine.in_flight.pooling._poolings


def test_dimensions_are_normalised_again():
    (found,) = together(tiny.engine(), PROMPTS[:1], PoolingParams(dimensions=5))
    whole = alone(tiny.native("llama"), PROMPTS[0])[:5]
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), atol=1e-5)
    (raw,) = together(tiny.engine(), PROMPTS[:1], PoolingParams(dimensions=5, normalize=False))
    np.testing.assert_allclose(raw / np.linalg.norm(raw), found, atol=1e-5)
    assert abs(np.linalg.norm(raw) - 1) > 0.01


def test_scores_are_log_probabilities_behind_the_prompt():
    engine = tiny.engine(max_num_batched_tokens=24)
    tiny.submit(engine, PROMPTS[:2], 20)
    for i, prompt in enumerate(PROMPTS):
        ids = [3, 1, 4][: 1 + i % 3]
        engine.add_request(f"s{i}", prompt, PoolingParams(score_token_ids=ids))
        engine.add_request(f"e{i}", prompt, PoolingParams())
    done = tiny.run(engine)
    for i, prompt in enumerate(PROMPTS):
        logits = tiny.logits_alone(tiny.native("llama"), prompt)[-1]
        wanted = (logits - np.logaddexp.reduce(logits))[[3, 1, 4][: 1 + i % 3]]
        np.testing.assert_allclose(done[f"s{i}"].pooled, wanted, atol=1e-4)
        compare([done[f"e{i}"].pooled], all_alone("llama", [prompt]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pooling", "cls"),
        ("dimensions", 0),
        ("normalize", 1),
        ("truncate_prompt_tokens", 0),
        ("score_token_ids", []),
    ],
)
def test_parameters_out_of_range_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        PoolingParams(**{name: value})


def test_more_scores_than_the_vocabulary_has_are_refused():
    params = PoolingParams(score_token_ids=[1] * (tiny.VOCAB + 1))
    with pytest.raises(RequestError, match=f"score_token_ids may have at most {tiny.VOCAB} ent"):
        tiny.engine().add_request("s", [5, 6], params)


def test_truncated_prompts_keep_their_end_of_sequence():
    three, context = (PoolingParams(truncate_prompt_tokens=n) for n in (3, -1))
    assert truncate([1, 2, 3, 9], three, 100, [9]) == [1, 2, 9]
    assert truncate([1, 2, 3, 4], three, 100, [9]) == [1, 2, 3]
    assert truncate([1, 2, 9], three, 100, [9]) == [1, 2, 9]
    assert truncate([8, 1, 2, 3, 9], three, 100, [8, 9]) == [8, 1, 9]
    assert truncate([1, 2, 3, 9], three, 3, [9]) == [1, 2, 9]
    assert truncate([1, 2, 3, 9], context, 3, [9]) == [1, 2, 9]
    assert truncate([1, 2, 9], context, 4, [9]) == [1, 2, 9]
    assert truncate([1, 2, 3, 9], PoolingParams(), 3, [9]) == [1, 2, 3, 9]


# The Python API


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", "qwen3")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    texts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(texts))
    return path


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), **OPTIONS)


def encode(text: str) -> list[int]:
    return [tiny.CHARACTERS.index(c) for c in text]


def test_embed_follows_the_folder(llm):
    native = tiny.build(tiny.config_of("qwen3", eos_token_id=tiny.EOS))
    one, other = llm.embed(["Hello", encode("Hello")], prompt_name="query")
    compare([np.array(one.embedding)], [alone(native, encode("Q: Hello"), "mean")])
    compare([np.array(other.embedding)], [alone(native, encode("Hello"), "mean")])
    (last,) = llm.embed("Hello", pooling_params=PoolingParams(pooling="last"))
    compare([np.array(last.embedding)], [alone(native, encode("Hello"))])
    assert last.prompt_token_ids == encode("Hello")
    (cut,) = llm.embed("Hello", pooling_params=PoolingParams(truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == encode("He")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda llm: llm.embed("a", prompt_name="no"),
            "prompt_name must be one of: query, document",
        ),
        (lambda llm: llm.embed(["a", "b" * 300]), "prompt 1: .*max_model_len"),
        (lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=999)), "dimensions"),
        (lambda llm: llm.embed(7), "list of them"),
        (lambda llm: llm.embed(["a", 5]), "prompt 1: a prompt must be .*, got 5"),
        (lambda llm: llm.score(["a", "b"], ["c"]), "2 queries for 1 documents"),
        (lambda llm: llm.score("a", [7]), "list of texts"),
        (lambda llm: llm.rerank("a", []), "empty"),
        (lambda llm: llm.rerank("a", ["b"], top_n="2"), "top_n must be .*, got '2'"),
        (lambda llm: llm.rerank("a", ["b"], top_n=-1), "top_n must be .*, got -1"),
    ],
)
def test_what_cannot_be_served_is_refused(llm, call, words):
    with pytest.raises(RequestError, match=words):
        call(llm)
    assert llm.metrics()["requests_running"] == llm.metrics()["requests_waiting"] == 0


def test_scores_of_embeddings_are_cosines(llm):
    texts = ["Paris", "A fish", "Berlin is a town"]
    query, *documents = llm.embed(["Q: Where?", *texts])
    wanted = [float(np.dot(query.embedding, d.embedding)) for d in documents]
    scores = llm.score("Where?", texts, pooling_params=PoolingParams(normalize=False))
    np.testing.assert_allclose([s.score for s in scores], wanted, atol=1e-5)
    best = llm.rerank("Where?", texts, top_n=2)
    assert [s.index for s in best] == sorted(range(3), key=lambda i: -wanted[i])[:2]
    assert len(llm.rerank("Where?", texts, top_n=0)) == 3


LETTERS = SimpleNamespace(encode=lambda text, **options: list(map(ord, text)))  # a tokenizer


def test_a_reranker_gives_the_probability_of_yes():
    config = PoolingConfig(score_token_ids=(5, 6))
    plan = plan_scores(config, LETTERS, ["q", "r"], ["d", "e"], PoolingParams(), 999, "Judge")
    first, second = ("".join(map(chr, ids)) for ids in plan.prompts)
    assert "<Instruct>: Judge\n<Query>: q\n<Document>: d<|im_end|>" in first
    assert "<Query>: r\n<Document>: e<|im_end|>" in second
    assert second.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert plan.params.score_token_ids == (5, 6)
    scores = plan.scores([np.array([0, 0]), np.array([2, 0])])
    assert scores == pytest.approx([0.5, 1 / (1 + np.exp(-2))])


def test_a_truncated_pair_keeps_its_form():
    config, params = PoolingConfig(score_token_ids=(5, 6)), PoolingParams(truncate_prompt_tokens=-1)
    (ids,) = plan_scores(config, LETTERS, "q", "d" * 999, params, 500).prompts
    assert len(ids) == 500
    assert "".join(map(chr, ids)).endswith(
        "ddd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


# The folder


def _module(kind: str, path: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": path}]


_MEAN, _LAST = {"pooling_mode_mean_tokens": True}, {"pooling_mode": "lasttoken"}
_NO_PROMPT = {"include_prompt": False}
_PROMPTS = {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}
_RERANKER, _YES = {"modules.json": _module("LogitScore", "1_L")}, {"true_token_id": 7}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, PoolingConfig()),
        ({"1_Pooling/config.json": _LAST}, PoolingConfig()),
        ({"1_Pooling/config.json": {"pooling_mode": "mean"}}, PoolingConfig("mean")),
        (
            {"modules.json": _module("Pooling", "2_P"), "2_P/config.json": _MEAN},
            PoolingConfig("mean"),
        ),
        ({"1_Pooling/config.json": {**_MEAN, **_NO_PROMPT}}, PoolingConfig("mean")),
        (
            {**_RERANKER, "1_L/config.json": {**_YES, "false_token_id": 8}},
            PoolingConfig(score_token_ids=(7, 8)),
        ),
    ],
)
def test_settings_of_a_folder(tmp_path, files, wanted):
    assert pooling_config(_write(tmp_path, files), "m", {"yes": 7, "no": 8}) == wanted


def test_a_default_prompt_that_the_folder_lacks_is_ignored(tmp_path, caplog):
    texts = {"prompts": {"query": "q: "}, "default_prompt_name": "passage"}
    folder = _write(tmp_path, {"config_sentence_transformers.json": texts})
    config = pooling_config(folder, "m", {})
    assert (config.prompt(None), config.prompt("query")) == ("", "q: ")
    assert "m: its default prompt 'passage' is ignored: its prompts are query" in caplog.text


def test_a_model_that_is_no_decoder_is_refused_by_name(tmp_path):
    folder = tiny.write_folder(tmp_path / "encoder", "qwen3", use_bidirectional_attention=True)
    llm = LLM(str(folder), **OPTIONS)
    with pytest.raises(RequestError, match=r"encoder gives no embeddings: its attention is"):
        llm.embed("Hello")
    assert llm.generate("Hello")[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": _module("Dense", "2_Dense")}, "Dense"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, "neither"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, **_MEAN}}, "neither"),
        ({"1_Pooling/config.json": {"pooling_mode_lasttoken": True, **_MEAN}}, "neither"),
        ({"1_Pooling/config.json": {**_MEAN, **_NO_PROMPT}, **_PROMPTS}, "excludes the prompt"),
        ({"config.json": {"use_bidirectional_attention": True}}, "causal"),
        ({"modules.json": {"type": 3}}, "cannot be read"),
        ({"modules.json": [{}]}, "cannot be read: no key 'type'"),
        ({"modules.json": 5}, "cannot be read: modules.json: must be"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 5}}}, "cannot be read"),
        ({**_RERANKER, "1_L/config.json": {"true_token_id": 9}}, "reranker"),
    ],
)
def test_folders_that_give_no_embeddings(tmp_path, files, words):
    config = pooling_config(_write(tmp_path, files), "m", {"yes": 7, "no": 8})
    assert words in (config.problem or "")


def test_a_name_tells_a_reranker(tmp_path):
    vocab = {"yes": 7, "no": 8}
    assert pooling_config(tmp_path, "org/Qwen3-Reranker-4B-4bit", vocab).score_token_ids == (7, 8)
    assert pooling_config(tmp_path, "qwen3-reranker-eval/llama", vocab).score_token_ids is None


@pytest.mark.parametrize(
    ("name", "files", "wanted"),
    [
        ("org/Qwen3-8B", {}, False),
        ("org/Qwen3-Embedding-8B-4bit", {}, True),
        ("org/nomic-embed-text", None, True),  # not on this machine
        ("embeddings/llama", None, False),
        ("org/e5-mistral", {"modules.json": []}, True),
        ("org/e5-mistral", {"1_Pooling/config.json": {}}, True),
    ],
)
def test_files_or_a_name_tell_a_model_that_only_pools(tmp_path, name, files, wanted):
    assert only_pools(None if files is None else _write(tmp_path, files), name) is wanted


def _write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def test_requests_with_equal_parameters_share_the_resolved_ones():
    model = tiny.packed("qwen3")
    first = resolved(PoolingParams(score_token_ids=[3, 4]), model)
    assert resolved(PoolingParams(score_token_ids=[3, 4]), model) is first
    assert (first.pooling, first.score_token_ids) == ("last", (3, 4))
    other = resolved(PoolingParams(normalize=False), model)
    assert (other.pooling, other.normalize) == ("last", False)
