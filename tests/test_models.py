"""Real mlx-lm models through packed steps, against the same model alone in mlx-lm.

Measured over all architectures: at most 2e-6 of the logits' scale in float32; `TOLERANCE` leaves
room for other BLAS libraries.  A wrong block table moves them by about their own scale.
"""

import mlx.nn as nn
import numpy as np
import pytest
import tiny_models as tiny

from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import InputBatch
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.loader import LoadedModel

TOLERANCE = 1e-4
BLOCKS, BLOCK_SIZE = 32, 8
PROMPTS = tiny.prompts(3, 30, 30, seed=1)
PROMPTS = [PROMPTS[0][:5], PROMPTS[1][:13], PROMPTS[2]]
NEXT = ((7, 19), (8, 23))  # what the two short prompts go on with, token by token

# (requests, how many tokens each had computed, how many it computes now): two whole prompts with a
# chunk, a chunk with context among decodes, the last chunk of one token among decodes.
STEPS = (
    ((0, 1, 2), (0, 0, 0), (5, 13, 12)),
    ((0, 1, 2), (5, 13, 12), (1, 1, 17)),
    ((1, 2, 0), (14, 29, 6), (1, 1, 1)),
)
SEQUENCES = (PROMPTS[0] + [7, 19], PROMPTS[1] + [8, 23], PROMPTS[2])


class Packed:
    """A few requests stepped by hand through one store."""

    def __init__(self, model: LoadedModel, seed: int = 0, poison: bool = False) -> None:
        self.model, self.poison = model, poison
        self.store = PagedStore(model.packed.attention_specs, BLOCKS, BLOCK_SIZE)
        self.attention = ReferenceAttention(self.store)
        self.inputs = InputBatch(4, 64, BLOCK_SIZE)
        blocks = np.random.default_rng(seed).permutation(BLOCKS).tolist()
        for sequence, prompt in zip(SEQUENCES, PROMPTS, strict=True):
            row = self.inputs.add(prompt, len(prompt))
            count = -(-len(sequence) // BLOCK_SIZE)
            self.inputs.append_blocks(row, [blocks.pop() for _ in range(count)])

    def step(self, requests: tuple, computed: tuple, scheduled: tuple) -> dict[int, np.ndarray]:
        """Run one step; the logits of its terminal segments, by request."""
        lengths = [len(s) for s in SEQUENCES]
        for r, start, count in zip(requests, computed, scheduled, strict=True):
            known = min(max(start + count, len(PROMPTS[r])), lengths[r])
            self.inputs.token_ids[r, :known] = SEQUENCES[r][:known]
            self.inputs.num_tokens[r] = known
        batch = self.inputs.pack(np.array(requests), np.array(computed), np.array(scheduled))
        batch.validate(BLOCKS)
        if self.poison:
            self._poison(computed, requests)
        step = self.attention.prepare(batch, batch.num_tokens + 3)
        logits = self.model.packed(step, self.attention, mx.array(batch.logits_indices))
        mx.eval(logits, self.store.arrays)
        terminal = [requests[i] for i in batch.sample_segments]
        return dict(zip(terminal, np.array(logits.astype(mx.float32)), strict=True))

    def _poison(self, computed: tuple, requests: tuple) -> None:
        """NaN into every slot that holds nothing: free blocks, ends of blocks, the padding."""
        full = np.zeros((BLOCKS + 1) * BLOCK_SIZE, bool)
        for r, count in zip(requests, computed, strict=True):
            positions = np.arange(count)
            table = self.inputs.block_tables[r]
            full[table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE] = True
        keep = mx.array(full)[:, None, None]
        for arrays in (self.store.keys, self.store.values):
            for layer, a in enumerate(arrays):
                arrays[layer] = mx.where(keep, a, mx.array(float("nan"), a.dtype))
        mx.eval(self.store.arrays)


def run_steps(packed: Packed) -> list[tuple[tuple[int, int], np.ndarray]]:
    """((request, number of tokens so far), logits) of every terminal segment of STEPS."""
    out = []
    for requests, computed, scheduled in STEPS:
        logits = packed.step(requests, computed, scheduled)
        ends = {r: c + n for r, c, n in zip(requests, computed, scheduled, strict=True)}
        out += [((r, ends[r]), rows) for r, rows in logits.items()]
    assert len(out) == 2 + 2 + 3
    return out


def largest_error(packed: Packed, model: nn.Module) -> float:
    """Largest difference to the model alone, relative to the scale of its logits."""
    expected = [tiny.logits_alone(model, s) for s in SEQUENCES]
    scale = max(np.abs(e).max() for e in expected)
    errors = [np.abs(x - expected[r][end - 1]).max() for (r, end), x in run_steps(packed)]
    return float(np.max(errors) / scale)  # NaN stays NaN, and fails every comparison


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_packed_chunked_and_mixed_steps_equal_the_model_alone(name):
    assert largest_error(Packed(tiny.packed(name)), tiny.native(name)) < TOLERANCE


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_nan_in_free_slots_never_leaks_and_block_order_changes_nothing(name):
    plain = run_steps(Packed(tiny.packed(name), seed=1))
    poisoned = run_steps(Packed(tiny.packed(name), seed=2, poison=True))
    for (_, a), (_, b) in zip(plain, poisoned, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_weights_are_random_enough_to_show_errors(name):
    """Or else all of the above proves nothing."""
    model, tokens = tiny.native(name), PROMPTS[2]
    plain = tiny.logits_alone(model, tokens)[-1]
    distant = [(t + 1) % tiny.VOCAB for t in tokens[:15]]  # out of the windows' reach
    changed = tiny.logits_alone(model, distant + tokens[15:])[-1]
    reordered = tiny.logits_alone(model, [*tokens[-2::-1], tokens[-1]])[-1]
    assert np.abs(changed - plain).std() > 0.2 * plain.std()
    assert np.abs(reordered - plain).std() > 0.3 * plain.std()
    assert len(set(tiny.alone(model, tokens, 24))) > 5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gemma4_shared_kv"])
def test_a_wrong_block_table_is_seen(name):
    packed = Packed(tiny.packed(name))
    packed.step(*STEPS[0])
    packed.inputs.block_tables[2, :2] = packed.inputs.block_tables[1, :2]
    got = packed.step(*STEPS[1])
    expected = {r: tiny.logits_alone(tiny.native(name), SEQUENCES[r]) for r in (0, 2)}
    scale = np.abs(expected[0]).max()
    assert np.abs(got[0] - expected[0][5]).max() < TOLERANCE * scale  # a neighbour is unharmed
    # Request 2 ends its chunk at 29 of 30 tokens and so reports nothing: look one step on.
    got = packed.step(*STEPS[2])
    assert np.abs(got[2] - expected[2][29]).max() > 0.1 * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantised_weights(name, bits):
    """Against mlx-lm on the same quantised weights: 4e-7 measured, as for plain ones."""
    config = tiny.config_of(name)
    models = [tiny.build(config) for _ in range(2)]
    for model in models:
        nn.quantize(model, group_size=32, bits=bits)
        mx.eval(model.parameters())
    packed = loader.from_model(models[0], None, config, name)
    assert largest_error(Packed(packed), models[1]) < TOLERANCE
    assert packed.weight_bytes < 0.5 * tiny.packed(name).weight_bytes
    assert packed.vocab_size == tiny.VOCAB


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_wrapped_model_still_works_by_itself(name):
    wrapped = tiny.packed(name).packed.model
    expected = tiny.logits_alone(tiny.native(name), PROMPTS[2])
    np.testing.assert_array_equal(tiny.logits_alone(wrapped, PROMPTS[2]), expected)


def test_wrapping_a_model_twice_changes_nothing():
    config = tiny.config_of("gemma2")
    model = tiny.build(config)
    loader.from_model(model, None, config, "first")
    again = loader.from_model(model, None, config, "again")
    assert largest_error(Packed(again), tiny.native("gemma2")) < TOLERANCE


def test_a_failing_forward_leaves_the_model_and_mlx_as_they_were(monkeypatch):
    name = "llama"
    sdpa, packed = mx.fast.scaled_dot_product_attention, Packed(tiny.packed(name))
    with monkeypatch.context() as m:
        m.setattr(packed.attention, "attend", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            packed.step(*STEPS[0])
    assert mx.fast.scaled_dot_product_attention is sdpa
    assert largest_error(packed, tiny.native(name)) < TOLERANCE
    expected = tiny.logits_alone(tiny.native(name), PROMPTS[2])
    wrapped = tiny.packed(name).packed.model
    np.testing.assert_array_equal(tiny.logits_alone(wrapped, PROMPTS[2]), expected)


_MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": None, "max_position_embeddings": 512,
        "num_key_value_heads": 4}  # fmt: skip
REFUSED = {
    "deepseek_v3": _MLA,
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": True, "use_conv_bias": True,
              "time_step_rank": 8},
    "llama4": {"text_config": {
        **tiny.config_of("llama"), "model_type": "llama4_text", "intermediate_size_mlp": 64,
        "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "num_local_experts": 4,
        "num_experts_per_tok": 1, "use_qk_norm": True, "head_dim": 16,
        "rope_scaling": None, "attention_bias": False}},
    "plamo3": {"sliding_window": 9, "sliding_window_pattern": 2},
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsupported_architectures_are_refused_by_name(model_type):
    config = {**tiny.config_of("llama"), "model_type": model_type, **REFUSED[model_type]}
    with pytest.raises(ModelLoadError) as error:
        loader.from_model(tiny.build(config), None, config, "the-model")
    message = str(error.value)
    assert model_type in message
    assert "not supported" in message
    assert "\n" not in message
