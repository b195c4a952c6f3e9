"""Prefixes that an engine finds on the disk after a restart: equal bytes, equal tokens.

The oracle is an engine that computes everything, and mlx-lm which runs each request alone.
"""

import errno
import random
import shutil
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from mlx.utils import tree_flatten

from metal.host import installed
from tests.support.engine.guesses import Guesses
from tests.support.engine.pool_accounts import check_accounts, check_slots
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import envs
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.llm import LLM
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.prefix_disk import folder, reader
from vllm_metal_lite.prefix_disk.block_bytes import BlockBytes
from vllm_metal_lite.prefix_disk.disk import PrefixDisk
from vllm_metal_lite.prefix_disk.namespace import namespace
from vllm_metal_lite.prefix_disk.parts import Parts
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.kv_groups import kv_groups
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names

# Models that are dense, or have latents, windows, recurrent layers, experts or shared indexers.
NAMES = (
    "llama", "qwen3", "deepseek_v3", "gemma3/w9", "gpt_oss", "llama4", "mamba2", "rwkv7", "lfm2",
    "qwen3_next", "jamba", "kimi_linear", "deepseek_v32",
)  # fmt: skip
LONG_TEST, THOROUGH = pytest.mark.long, pytest.mark.thorough
LONG, OTHER = tiny.prompts(2, 60, 60, seed=5)
# The first is used again, as a whole and in part.
PROMPTS = [LONG, LONG, LONG[:48] + OTHER[:10]]
MEASURED = 4  # a seed whose engines decide by their own speeds
start = partial(tiny.engine, prefix_disk_gib=1)  # an engine that keeps prefixes
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Parts, "min_tokens", 8)
    monkeypatch.setattr(folder.Folder, "free_margin", 0)  # the disk of a test machine may be full
    monkeypatch.setattr(reader, "_MIN_ROWS", 8)
    monkeypatch.setattr(reader, "_READ", 1e18)  # reading is preferred, whatever the speed here


def restarted(name: str, **options: Any) -> tuple[LLMEngine, list[list[int]]]:
    """An engine that finds what another one kept, and the tokens of that one's requests.

    options: of the second engine.
    """
    expected = tiny.tokens_of(serve(start(name), PROMPTS[:2]))
    return start(name, **options), expected


def serve(engine: LLMEngine, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    """One request after another, so that later ones hit what earlier ones left."""
    done: dict[str, RequestOutput] = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY, **options)
        done |= tiny.run(engine)
    rest(engine)
    return [done[str(i)] for i in range(len(prompts))]


def rest(engine: LLMEngine) -> None:
    while engine.rest():
        pass
    if isinstance(engine.prefix_disk, PrefixDisk):
        engine.prefix_disk.writer.flush()
    check_accounts(engine.scheduler.kv, ())


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(n, {}, marks=[] if n in ("llama", "qwen3_next") else LONG_TEST) for n in NAMES]
    + [
        pytest.param(n, {"kv_bits": 8}, marks=LONG_TEST if n in NAMES[:5] else THOROUGH)
        for n in NAMES
    ],
)
def test_tokens_after_a_restart_are_those_computed(name, options):
    expected = serve(start(name, **options), PROMPTS)
    if not options:
        assert tiny.tokens_of(expected)[0] == tiny.alone(tiny.native(name), LONG, 8)
    restored = serve(again := start(name, **options), PROMPTS)
    assert tiny.tokens_of(restored) == tiny.tokens_of(expected)
    assert restored[0].num_cached_tokens == 56  # of 60, in blocks of 8
    assert [output.num_restored_tokens for output in restored[:2]] == [56, 0]
    metrics = again.metrics()
    assert metrics["prefix_disk_restored_tokens"] >= 56
    assert metrics["prefix_disk_errors"] == 0


def test_a_pause_is_used_though_a_step_was_ahead_of_the_last_stop():
    engine = start()
    for prompt in PROMPTS[:2]:
        whole = tiny.alone(tiny.native("llama"), prompt, 8)
        engine.add_request("r", prompt, tiny.greedy(8, stop_token_ids=whole[:1]))
        tiny.run(engine)
    assert engine.in_flight.outputs
    rest(engine)
    assert engine.metrics()["prefix_disk_written_bytes"]


@LONG_TEST
def test_tokens_after_a_restart_through_kernels():
    with installed():
        engines = [tiny.engine_with_kernels("qwen3", prefix_disk_gib=1) for _ in range(2)]
        expected, _ = serve(engines[0], PROMPTS[:2])
        engines[1].prefix_disk.folder.refresh()
        (restored,) = serve(engines[1], PROMPTS[:1])
    assert restored.num_cached_tokens == 56
    assert tiny.tokens_of([restored]) == tiny.tokens_of([expected])


@LONG_TEST
@pytest.mark.parametrize("name", ["gemma3/w9", "qwen3_next"])
def test_bytes_after_a_restart_are_equal(name):
    kept = []
    for _ in range(2):
        engine = start(name)
        serve(engine, PROMPTS[:2])
        kept.append(bytes_of(engine, LONG[:56]))
    assert len(kept[0]) >= 8
    assert kept[0] == kept[1]


def bytes_of(engine: LLMEngine, prefix: list[int]) -> list[bytes]:
    """The bytes of a prefix: of its blocks, and of the state after it."""
    of, names = engine.prefix_disk, []
    extend_block_names(names, prefix, 8, len(prefix) // 8)
    parts = of.parts.of(names)
    found = [bytes(of.blocks.read(part.group, of.parts.place_of(part))) for part in parts]
    of.blocks.close()
    return found


def files_of(engine: LLMEngine) -> list:
    return [engine.prefix_disk.folder.path_of(key) for key in engine.prefix_disk.folder.known]


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "missing"])
def test_a_bad_file_is_dropped_and_its_tokens_are_computed(damage):
    first = start("llama")
    expected = tiny.tokens_of(serve(first, PROMPTS))
    files = files_of(first)
    contents = [file.read_bytes() for file in files]
    for i, (file, content) in enumerate(zip(files, contents, strict=True)):
        if damage == "flip":
            at = (i * 997) % len(content)  # in the header of some, in the rows of others
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        elif damage == "cut":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "foreign":
            file.write_bytes(contents[i - 1])
        else:
            file.unlink()
    again = start("llama")
    assert tiny.tokens_of(serve(again, PROMPTS)) == expected
    metrics = again.metrics()
    assert metrics["prefix_disk_restored_tokens"] == 0
    assert (metrics["prefix_disk_errors"] > 0) == (damage != "missing")


@pytest.mark.parametrize("name", ["gemma3/w9", "qwen3_next"])
def test_a_prefix_that_lost_a_file_is_completed_at_its_next_use(name):
    again, _ = restarted(name)
    files_of(again)[0].unlink()
    assert serve(again, PROMPTS[:2])[0].num_restored_tokens == 0
    assert serve(start(name), PROMPTS[:2])[0].num_restored_tokens == 56


def test_others_go_on_while_a_request_waits_for_the_disk():
    again, expected = restarted("llama")
    allowed = Event()
    read = again.prefix_disk.folder.read
    again.prefix_disk.folder.read = lambda *args: allowed.wait() and read(*args)
    again.add_request("held", LONG, GREEDY)
    again.add_request("passes", OTHER, GREEDY)
    passed = None
    while passed is None:
        passed = next((o for o in again.step() if o.finished), None)
    assert passed.request_id == "passes"
    assert len(again.scheduler.waiting) == 1
    allowed.set()
    held = tiny.run(again)["held"]
    assert held.num_cached_tokens == 56
    assert tiny.tokens_of([held]) == expected[:1]


def test_an_interrupt_during_a_restore():
    again, expected = restarted("gemma3/w9")
    blocks = again.prefix_disk.blocks
    write = blocks.write

    def interrupted(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    again.add_request("a", LONG, GREEDY)
    blocks.write = interrupted
    with pytest.raises(KeyboardInterrupt):
        tiny.run(again)
    blocks.write = write
    output = tiny.run(again)["a"]
    assert (tiny.tokens_of([output]), output.num_restored_tokens) == (expected[:1], 56)
    assert tiny.tokens_of(serve(again, [LONG])) == expected[:1]


@LONG_TEST
def test_what_generate_leaves_is_on_the_disk():
    for restored in 0, 48:
        llm = LLM(prefix_disk_gib=1, num_blocks=64, max_num_seqs=2)
        (output,) = llm.generate({"prompt_token_ids": LONG}, GREEDY)
        assert output.num_restored_tokens == restored
        llm.generate({"prompt_token_ids": LONG}, GREEDY)


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_restore_that_nobody_wants_any_more_leaves_nothing(how):
    again, expected = restarted("qwen3_next")
    again.add_request("a", LONG, GREEDY)
    while again.prefix_disk.reader.restore is None:
        again.step()
    if how == "abort":
        again.abort("a")
        again.prefix_disk.between_steps()
        while again.prefix_disk.reader.restore is not None:
            again.prefix_disk.wait()
            again.prefix_disk.between_steps()
        check_accounts(again.scheduler.kv, ())
    else:
        again.reset_prefix_cache()
        output = tiny.run(again)["a"]
        assert (tiny.tokens_of([output]), output.num_cached_tokens) == (expected[:1], 0)
        serve(again, [OTHER, OTHER])
        assert again.metrics()["prefix_disk_written_bytes"] == 0


@LONG_TEST
@pytest.mark.parametrize(
    "seed", [0, MEASURED, *(pytest.param(n, marks=THOROUGH) for n in (1, 2, 3))]
)
@pytest.mark.parametrize("name", ["llama", "gemma3/w9", "qwen3_next", "mamba2"])
def test_many_requests_and_restarts_over_few_blocks(name, seed):
    """Prefixes come and go in memory, and requests are preempted and aborted meanwhile."""
    numbers = random.Random(seed)
    stems = tiny.prompts(3, 60, 60, seed=11)
    restored = 0
    for _ in range(3):
        num_blocks, gib = numbers.choice([16, 24, 40]), numbers.choice([None, 0.0001])
        engine = start(name, num_blocks=num_blocks, max_num_seqs=3, state_cache_gib=gib)
        if seed == MEASURED:
            engine.prefix_disk.reader.speeds.read = 5e8
        wanted, done = {}, {}
        for i in range(12):
            prompt = [*numbers.choice(stems)[: numbers.randrange(9, 60)], i]
            wanted[str(i)] = prompt
            named = [numbers.randrange(8, 40)] if numbers.random() < 0.3 else []
            checkpoints = [at for at in named if at <= len(prompt)]
            engine.add_request(str(i), prompt, GREEDY, checkpoints=checkpoints)
            for _ in range(numbers.randrange(6)):
                done |= {o.request_id: o for o in engine.step() if o.finished}
            if numbers.random() < 0.1:
                engine.abort(str(i))
                wanted.pop(str(i))
        done |= tiny.run(engine)
        rest(engine)
        if engine.scheduler.kv.states is not None:
            check_slots(engine.scheduler.kv.states)
        for request_id, prompt in wanted.items():
            expected = tiny.alone(tiny.native(name), prompt, 8)
            assert done[request_id].outputs[0].token_ids == expected
        restored += engine.metrics()["prefix_disk_restored_tokens"]
        assert engine.metrics()["prefix_disk_errors"] == 0
    assert restored > 0 or seed == MEASURED


def test_a_prefix_is_restored_beside_a_request_whose_drafts_take_all_state_slots():
    """Between steps they have the slots no more."""
    name, size = "qwen3_next", tiny.load("qwen3_next").state_bytes
    how = {"max_num_seqs": 2, "state_cache_gib": 2.5 * size / 2**30, "speculate": "auto"}
    again, expected = restarted(name, **how)
    answer = tiny.alone(tiny.native(name), OTHER[:9], 60)
    again.in_flight.speculator = guesses = Guesses(again, {"drafts": answer}, right=1.0)
    guesses.wants = lambda decodes: True
    guesses.random.randint = lambda low, high: 7
    again.add_request("drafts", OTHER[:9], tiny.greedy(60, ignore_eos=True))
    again.step()
    again.step()
    assert again.scheduler.kv.states.num_available == 0
    again.add_request("waits", LONG, GREEDY)
    done = tiny.run(again)
    rest(again)
    assert done["drafts"].outputs[0].token_ids == answer
    assert tiny.tokens_of([done["waits"]]) == expected[:1]
    assert done["waits"].num_restored_tokens == 56


def test_with_too_few_blocks_nothing_is_restored():
    again, expected = restarted("llama", num_blocks=16)
    again.add_request("runs", OTHER, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    again.step()
    again.add_request("waits", LONG, GREEDY)
    done = tiny.run(again)
    assert done["waits"].outputs[0].token_ids == expected[0]
    assert again.scheduler.num_preemptions == 0


@LONG_TEST
@pytest.mark.parametrize(
    "change",
    [("model", "qwen3"), ("dtype", mx.bfloat16), ("kv_bits", 8), ("block_size", 16), ("salt", "x")],
    ids=lambda change: change[0],
)
def test_another_model_form_or_salt_never_hits(change):
    serve(start("llama"), PROMPTS[:2])
    options = {"model": "llama", **dict([change])}
    salt = options.pop("salt", None)
    other = start(**options)
    other.add_request("a", {"prompt_token_ids": LONG, "cache_salt": salt}, GREEDY)
    assert tiny.run(other)["a"].num_cached_tokens == 0


def namespace_of(model: LoadedModel, attention: str = "auto") -> bytes:
    return namespace(model, kv_groups(model.kv_specs), 8, attention)


def test_other_weights_have_another_namespace():
    config = tiny.config_of("llama")
    models = [loader.from_model(tiny.build(config, seed), None, config, "m") for seed in (0, 1, 0)]
    found = [namespace_of(model) for model in models]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_one_changed_value_or_moved_row_of_any_weight_gives_another_namespace(name):
    model, numbers = tiny.load(name), random.Random(3)
    module = model.packed.model
    before, seen = namespace_of(model), set()
    weights = tree_flatten(module.parameters())
    for weight, array in weights:
        changed, moved = np.array(array), np.roll(np.array(array), 1, axis=0)
        changed.reshape(-1).view(np.uint8)[numbers.randrange(array.nbytes)] ^= 1
        for other in changed, moved:
            if not np.array_equal(other, np.array(array)):
                module.load_weights([(weight, mx.array(other))], strict=False)
                seen.add(namespace_of(model))
                module.load_weights([(weight, array)], strict=False)
    assert namespace_of(model) == before
    assert before not in seen
    assert len(seen) > len(weights)


@pytest.mark.parametrize("name", ["llama", "youtu_llm", "plamo2", "baichuan_m1"])
def test_another_config_has_another_namespace(name):
    """The weights are equal.  Some of these models do not keep their arguments."""
    changes = {}, {"rope_theta": 1234.0}, {"rope_theta": 4321.0}
    found = [namespace_of(tiny.load(name, **change)) for change in (*changes, {})]
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_copy_of_a_model_has_its_namespace_and_another_file_of_it_has_not(tmp_path):
    path = tiny.write_folder(tmp_path / "model", "llama")
    tiny.edit(path / "config.json", model_file="custom.py")
    (path / "custom.py").write_text("from mlx_lm.models.llama import Model, ModelArgs")
    copy = shutil.copytree(path, tmp_path / "copy", copy_function=shutil.copyfile)
    models = [loader.load(str(folder), trust_remote_code=True) for folder in (path, copy)]
    (path / "custom.py").write_text("from mlx_lm.models.llama import ModelArgs, Model")
    tiny.edit(copy / "config.json", rope_theta=1234.0)
    models += [loader.load(str(folder), trust_remote_code=True) for folder in (path, copy)]
    first, of_copy, *others = map(namespace_of, models)
    assert first == of_copy
    second_rank = replace(models[0], ranks=SimpleNamespace(rank=1, size=2))
    others += [namespace_of(models[0], "reference"), namespace_of(second_rank)]
    assert len({first, *others}) == 5


def test_a_full_disk_costs_nothing_but_the_cache(monkeypatch, caplog):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(folder, "write_file", full)
    engine = start("llama")
    expected = [tiny.alone(tiny.native("llama"), LONG, 8)] * 2
    assert tiny.tokens_of(serve(engine, PROMPTS)[:2]) == expected
    assert not engine.prefix_disk.folder.known
    assert not engine.prefix_disk.folder.models()
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("of", "method"), [(BlockBytes, "read"), (BlockBytes, "write"), (folder.Folder, "read")]
)
def test_an_error_of_the_cache_fails_no_request(monkeypatch, caplog, of, method):
    again, _ = restarted("llama")
    monkeypatch.setattr(of, method, Mock(side_effect=MemoryError("no room for a copy")))
    prompts = [LONG, OTHER, OTHER]  # the first is read from the disk, the last is written
    expected = [tiny.alone(tiny.native("llama"), prompt, 8) for prompt in prompts]
    assert tiny.tokens_of(serve(again, prompts)) == expected
    assert "no room for a copy" in caplog.text
    assert again.metrics()["prefix_disk_errors"] == 1


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_cache(tmp_path, caplog):
    envs.cache_folder().mkdir(parents=True)
    envs.prefix_folder().write_text("in the way")
    engine = start("llama")
    assert engine.prefix_disk.description is None
    assert tiny.tokens_of(serve(engine, [LONG])) == [tiny.alone(tiny.native("llama"), LONG, 8)]
    assert "prefixes are not kept on the disk" in caplog.text


def test_the_prefix_before_a_named_checkpoint_is_kept_at_its_first_use():
    first, again = (start("qwen3_next") for _ in range(2))
    serve(first, [LONG], checkpoints=[24, 40])
    again.prefix_disk.folder.refresh()
    (output,) = serve(again, [LONG[:26] + OTHER])
    assert output.num_cached_tokens == 24


def test_only_counting_blocks_are_missing():
    """Without attention layers, blocks only count tokens, and have no files."""
    engine = start("mamba2", num_blocks=16, max_num_seqs=2)
    (long,) = tiny.prompts(1, 100, 100, seed=7)
    expected = tiny.tokens_of(serve(engine, [LONG, LONG, long]))
    reader = engine.prefix_disk.reader
    speed, reader.speeds.compute = reader.speeds.read, 1.0
    (again,) = serve(engine, [LONG])
    assert again.num_cached_tokens == 56
    assert tiny.tokens_of([again]) == expected[:1]
    assert reader.speeds.read == speed
    assert tiny.tokens_of(serve(engine, [long, LONG])) == [expected[2], expected[0]]


@pytest.mark.parametrize(("late", "least", "most"), [(5, 0.7, 100), (1000, 0.5, 0.5)])
def test_a_restore_longer_than_computing_halves_the_speed(late, least, most):
    """Steps of other requests delay the copies a little.  That is not time of reading."""
    again, _ = restarted("llama")
    reader = again.prefix_disk.reader
    fast = reader.speeds.read
    again.add_request("a", LONG, GREEDY)
    while reader.restore is None:
        again.step()
    reader.restore.deadline -= late
    tiny.run(again)
    assert least * fast <= reader.speeds.read <= most * fast


def test_reading_that_takes_longer_than_computing_is_left_out_but_tried_again():
    again, _ = restarted("llama")
    measured = again.prefix_disk.reader.speeds
    measured.read = sum(file.stat().st_size for file in files_of(again)) / 56 / 1.05
    restored = []
    for _ in range(8):
        measured.compute = 1.0
        again.scheduler.kv.reset()
        restored += [output.num_restored_tokens for output in serve(again, [LONG])]
    assert restored[0] == 0 < restored[-1]
