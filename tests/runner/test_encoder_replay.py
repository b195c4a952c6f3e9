"""Every two launches that touch the store, one of them writing, are ordered by MLX's own rules.

Whole steps of an engine are recorded and evaluated on a replay of MLX's Metal encoder, at several
sizes of a command buffer.  See tests/support/replay/replay.py for the approximations.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.models import tiny_models as tiny
from tests.support.replay.encoder import Encoder, Limits
from tests.support.replay.graph import OURS, WRITERS, WRITES_IF_FUSED, Graph, any_order
from tests.support.replay.record import record, use_kernels
from tests.support.replay.replay import Replay
from vllm_metal_lite import devices
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.store import new_ticket
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling_params import SamplingParams

# Command buffers of one primitive, of 7, of 40 (MLX's default), and of a whole step.
LIMITS = [Limits(0, 0), Limits(7, 40), Limits(40, 40), Limits(1 << 30, 1 << 30)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = tiny.prompts(4, 20, 40, seed=3)


@pytest.fixture(autouse=True)
def prompts_are_no_decodes(monkeypatch):
    monkeypatch.setitem(devices.PROFILES, "metal", replace(devices.METAL, rows_as_decodes=0))


def make_engine(
    name: str = "qwen3", prefill: str = "varlen", fused: bool = True, **options: Any
) -> LLMEngine:
    made = tiny.engine(tiny.load(name), **{"max_num_batched_tokens": 128, **options})
    fusion = None if fused else NO_FUSION
    return use_kernels(made, prefill, fusion)


def arrivals(engine: LLMEngine) -> None:
    """Prompts, decodes one step ahead, a prompt beside decodes, decodes, the last one alone."""
    tiny.submit(engine, PROMPTS[:3], PARAMS)
    for _ in range(4):
        engine.step()
    engine.add_request("late", PROMPTS[3], PARAMS)
    tiny.run(engine)


def kernels_of(graph: Graph) -> set[str]:
    return {node.label.removeprefix(OURS) for node in graph.nodes if node.label.startswith(OURS)}


def check(graph: Graph, **how: Any) -> None:
    """No conflict is unordered, whatever the size of a command buffer."""
    for limits in LIMITS:
        for tickets_only in (False, True):
            encoder = Replay(graph, limits, tickets_only=tickets_only, **how).run().encoder
            assert next(encoder.conflicts(), None), "no launch touches the store"
            assert not encoder.faults(), (limits, tickets_only)


@pytest.mark.parametrize(
    ("how", "kernels"),
    [
        ({}, {"paged_decode", "rope_write", "varlen_prefill"}),
        ({"prefill": "gather"}, {"paged_decode", "rope_write", "kv_gather"}),
        ({"fused": False}, {"paged_decode", "kv_write", "varlen_prefill"}),
        ({"kv_bits": 8}, {"paged_decode", "rope_write", "varlen_prefill"}),
        (
            {"kv_bits": 8, "fused": False, "prefill": "gather"},
            {"kv_write_quantised", "kv_gather_quantised"},
        ),
        ({"name": "gemma3_text/w9"}, {"paged_decode", "varlen_prefill"}),
        ({"name": "deepseek_v3"}, {"latent_attention", "latent_write"}),
        ({"name": "deepseek_v3", "fused": False, "prefill": "gather"}, {"kv_write", "kv_gather"}),
        ({"name": "falcon_h1"}, {"paged_decode", "varlen_prefill"}),
        ({"name": "lfm2", "prefill": "gather"}, {"paged_decode", "kv_gather"}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_prompts_mixed_steps_and_decodes_one_step_ahead(how, kernels):
    graph = record(make_engine(**how), arrivals)
    assert kernels <= kernels_of(graph)
    labels = {step.label for step in Replay(graph).run().steps}
    assert {"prompt", "mixed ahead", "decode ahead"} <= labels
    check(graph)


def test_layers_that_share_arrays():
    """As under vLLM: groups of layers take blocks from one pool."""
    engine = make_engine("gemma3_text/w9")
    old = engine.runner.attention
    groups = [replace(group, num_blocks=64) for group in engine.kv_groups]
    store = PagedStore(old.store.specs, groups, 8, shared=True)
    assert len({id(a) for a in store.arrays}) < len(old.store.arrays)
    path = replace(engine.runner.path, attention=old.over(store))
    engine.in_flight.pipeline.runner = ModelRunner(engine.model.packed, path, engine.runner.sampler)
    check(record(engine, arrivals))


def test_any_order_of_evaluation():
    """Tickets alone order the launches; MLX's order of evaluation is not needed."""
    graph = record(make_engine(), arrivals)
    for seed in range(4):
        check(graph, order=any_order(seed))


def test_rows_of_prompts_as_decodes_behind_a_shared_prefix(monkeypatch):
    changed = replace(devices.METAL, min_saved_tokens=16, min_saved_for_prompts=16)
    monkeypatch.setitem(devices.PROFILES, "metal", changed)
    stem = PROMPTS[0][:16]

    def drive(engine: LLMEngine) -> None:
        engine.add_request("first", [*stem, 1], PARAMS)
        engine.step()
        for i in range(3):
            engine.add_request(str(i), [*stem, 2, i], PARAMS)
        tiny.run(engine)
        assert engine.metrics()["prefix_cache_hit_tokens"] >= 3 * 16

    graph = record(make_engine(), drive)
    assert kernels_of(graph) >= {"varlen_prefill", "paged_decode"}
    check(graph)


def test_blocks_that_change_hands_by_preemptions_and_aborts():
    def drive(engine: LLMEngine) -> None:
        tiny.submit(engine, PROMPTS, replace(PARAMS, max_tokens=24))
        for _ in range(6):
            engine.step()
        engine.abort("0")  # its last step is in flight
        engine.add_request("again", PROMPTS[1], PARAMS)
        tiny.run(engine)
        assert engine.metrics()["preemptions"] > 0

    check(record(make_engine(num_blocks=14, max_model_len=100), drive))


def test_all_requests_aborted_with_a_step_in_flight():
    def drive(engine: LLMEngine) -> None:
        engine.add_request("a", PROMPTS[0], PARAMS)
        engine.step()
        engine.abort("a")
        arrivals(engine)

    check(record(make_engine(), drive))


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 2, 4])
def test_a_step_that_mlx_breaks_off_and_its_repetition(failing):
    """The repetition starts from the ticket of the last step that was submitted whole."""

    def drive(engine: LLMEngine) -> None:
        tiny.submit(engine, PROMPTS, PARAMS)
        failures = 0
        while engine.has_unfinished_requests():
            try:
                engine.step()
            except RuntimeError:
                failures += 1
        assert failures == 1

    without_waiting = []
    for after in (8, 16, 32):
        graph = record(make_engine(), drive, fails={failing: after})
        check(graph)
        replay = Replay(graph, LIMITS[-1], tickets_only=True, waits_after_errors=False)
        without_waiting += replay.run().encoder.faults()
    # MLX before 0.32.2 does not wait: a first write and its repetition are unordered.
    assert without_waiting


def test_a_large_store_ends_a_command_buffer_in_each_layer():
    """Unless the limit of elements is above a step's share of the store."""
    graph = record(make_engine(), arrivals)
    layers = len([given for given in graph.arguments if given.startswith("store keys")])
    for name in graph.arguments.values():
        graph.shapes[name] = (50 << 20,)

    def commits(mb: int) -> int:
        """Of a step of decodes."""
        steps = Replay(graph, Limits(1000, mb)).run().steps
        return next(step.commits for step in steps if step.label == "decode ahead")

    assert commits(40) == layers + 1
    assert commits(2 * 50 * layers + 40) == 1


# Faults that must be noticed


def is_noticed(graph: Graph) -> bool:
    """Whether `check` would fail."""
    return any(Replay(graph, limits, tickets_only=True).run().encoder.faults() for limits in LIMITS)


def with_inputs(graph: Graph, inputs: dict[int, tuple[str, ...]]) -> Graph:
    """A copy in which some nodes have other inputs."""
    nodes = [replace(n, inputs=inputs.get(i, n.inputs)) for i, n in enumerate(graph.nodes)]
    return replace(graph, nodes=nodes)


def with_ticket(graph: Graph, node: int, ticket: str) -> tuple[str, ...]:
    given = graph.nodes[node].parameters["ticket"]
    return tuple(ticket if name == given else name for name in graph.nodes[node].inputs)


def test_every_ticket_is_needed():
    """Each launch in turn takes the ticket from before the first step."""
    graph = record(make_engine(), arrivals)
    users = [i for i, node in enumerate(graph.nodes) if "ticket" in node.parameters]
    first, *others = sorted(users, key=lambda i: graph.nodes[i].turn)
    initial = graph.nodes[first].parameters["ticket"]
    assert len(others) > 30
    for node in others:
        changed = with_inputs(graph, {node: with_ticket(graph, node, initial)})
        assert is_noticed(changed), graph.nodes[node]


@pytest.mark.parametrize("name", ["rope_write", "paged_decode", "varlen_prefill"])
@pytest.mark.parametrize("fault", ["takes no ticket", "gives the old ticket"])
def test_a_launch_that_breaks_the_chain_is_noticed(monkeypatch, name, fault):
    launch = Kernel.__call__

    def broken(kernel: Kernel, arrays: Any, *args: Any) -> list[mx.array]:
        *others, ticket = arrays
        if kernel.name != name:
            return launch(kernel, arrays, *args)
        if fault == "takes no ticket":
            return launch(kernel, [*others, new_ticket()[:1]], *args)
        return [*launch(kernel, arrays, *args)[:-1], ticket]

    monkeypatch.setattr(Kernel, "__call__", broken)
    assert is_noticed(record(make_engine(), arrivals))


# What the replay believes


def test_the_list_of_writers_is_that_of_the_sources():
    """A kernel writes where it casts away the `const` of the store or of a state store."""
    writers = set()
    for name in (file.stem for file in source.FOLDER.glob("*.metal")):
        text = "".join(source.read(name))
        if re.search(
            r"const_cast<[^>]*>\((keys|values|states)\)|\(device \w+\*\)(keys|values)", text
        ):
            writers.add(name)
    assert writers == WRITERS | WRITES_IF_FUSED


def encoder_of(*launches: tuple[str, list[int], list[int]], limits: Limits = LIMITS[-1]) -> Encoder:
    encoder = Encoder(limits)
    for name, inputs, outputs in launches:
        for buffer in inputs:
            encoder.take(buffer, 1 << 20)
        for buffer in outputs:
            encoder.give(buffer, 1 << 20)
        encoder.dispatch(name)
        encoder.end_primitive()
    encoder.end_eval()
    return encoder


def test_a_barrier_orders_all_before_it_and_all_behind_it():
    encoder = encoder_of(("a", [1], [2]), ("b", [1], [3]), ("c", [2], [4]), ("d", [1], [5]))
    a, b, c, d = encoder.launches
    assert encoder.barriers == 1
    assert not encoder.is_ordered(a, b)
    assert encoder.is_ordered(b, c)
    assert encoder.is_ordered(b, d)
    assert not encoder.is_ordered(c, d)


def test_a_write_behind_a_read_gets_a_barrier():
    assert encoder_of(("a", [1], [2]), ("b", [3], [1])).barriers == 1


def test_fences_follow_buffers_and_nothing_else():
    encoder = encoder_of(
        ("a", [1], [2]), ("b", [1], [3]), ("c", [2], [4]), ("d", [4], [5]), limits=Limits(0, 99)
    )
    a, b, c, d = encoder.launches
    assert [launch.encoder for launch in encoder.launches] == [0, 1, 2, 3]
    assert encoder.is_ordered(a, c)
    assert encoder.is_ordered(a, d), "by c"
    assert not encoder.is_ordered(a, b)
    assert not encoder.is_ordered(b, d)


def test_a_command_buffer_ends_beyond_its_limits():
    chain = [(str(i), [i], [i + 1]) for i in range(9)]
    assert encoder_of(*chain, limits=Limits(2, 99)).commits == 4  # of three launches, and the end
    # Arrays of 2^20 elements: a launch takes two, or one more than the launch before it.
    assert encoder_of(*chain, limits=Limits(99, 3)).commits == 4
    assert encoder_of(*chain, limits=Limits(99, 10)).commits == 1
