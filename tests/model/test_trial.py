"""The trial of a packed model: rounding alone never fails it, and a misfit always does."""

import os
from collections import defaultdict
from dataclasses import replace
from unittest.mock import Mock

import mlx.nn as nn
import numpy as np
import pytest

from tests.support.engine import rank_threads
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from tests.support.models.rounding import gather_in_16_bits, medians, rounding
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention, ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import trial
from vllm_metal_lite.model.adapters import adapt
from vllm_metal_lite.model.layout import find_layout
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.model.packed import PackedModel

# Routing each token to 4 of 16 experts in many layers is chaotic: rounding changes the choice.
EXPERTS = {
    "num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 12,
}  # fmt: skip
NAMES = ("llama", "qwen3_moe", "glm4_moe_lite")  # dense; experts; experts and latent attention


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes) -> nn.Module:
    model = rounding(tiny.build({**config_of(name), **changes}, seed))
    model.set_dtype(dtype)
    adapt(model)
    return model


def packed(model: nn.Module, name: str) -> PackedModel:
    return PackedModel(model, find_layout(model, name))


def attention(ours: PackedModel, cls: type = ReferenceAttention) -> ReferenceAttention:
    return cls(PagedStore(ours.layout.specs, 4, trial.BLOCK))


class Blind(ReferenceAttention):
    """As if a module attended to nothing but its own rows."""

    def begin(self, step, state):
        return BlindStep(self.store, step)


class BlindStep(ReferenceStepAttention):
    def attend(self, q, call):
        return super().attend(q, call._replace(scores=call.scores._replace(window=1)))


class Restarting(ReferenceAttention):
    """As if positions began again in each block of four tokens."""

    def prepare(self, batch, num_rows):
        step = super().prepare(batch, num_rows)
        return step._replace(positions=step.positions % 4)


class Swapped(ReferenceAttention):
    """Each request reads the blocks of the other."""

    def prepare(self, batch, num_rows):
        step = super().prepare(batch, num_rows)
        other = super().prepare(replace(batch, block_tables=batch.block_tables ^ 2), num_rows)
        return step._replace(plan=other.plan)


@pytest.mark.parametrize(
    "name", ["deepseek_v3", pytest.param("glm4_moe_lite", marks=pytest.mark.long)]
)
def test_a_model_whose_experts_flip_is_not_refused(name):
    """By an error that a fixed limit for the median row (0.25) would refuse."""
    refused = 0
    for seed in range(2):
        model = build(name, seed=seed, **EXPERTS)
        ours = packed(model, name)
        rows = trial.Draw(model, tiny.VOCAB).rows(ours, attention(ours))
        refused += max(medians(rows)) > 0.25
        assert trial.Trial(model, tiny.VOCAB).problem(ours, attention(ours)) is None
    assert refused


@pytest.mark.long
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused_whatever_rounding_does(monkeypatch, name, dtype):
    gather_in_16_bits(monkeypatch)
    model = build(name, dtype, **EXPERTS | {"num_hidden_layers": 4})
    ours, judge = packed(model, name), trial.Trial(model, tiny.VOCAB)
    assert judge.problem(ours, attention(ours)) is None
    for wrong in (Blind, Restarting, Swapped):
        problem = judge.problem(ours, attention(ours, wrong))
        assert problem is not None, wrong
        assert "away from mlx-lm's own" in problem


def test_one_wrong_row_is_enough_without_16_bits(monkeypatch):
    model = tiny.build(config_of("llama"))
    ours, judge = packed(model, "llama"), trial.Trial(model, tiny.VOCAB)
    rows = trial.Draw.rows

    def one_wrong(self, *args):
        first, *others = rows(self, *args)
        return [first._replace(error=0.5), *others]

    monkeypatch.setattr(trial.Draw, "rows", one_wrong)
    assert "a row of its packed logits is 0.5" in judge.problem(ours, attention(ours))


def test_tokens_are_drawn_again_where_a_row_flips_by_chance(monkeypatch):
    """Noise that the chunks did not show: the second tokens are as they should be."""
    model = tiny.build(config_of("llama"))
    ours, judge, draws = packed(model, "llama"), trial.Trial(model, tiny.VOCAB), []
    rows = trial.Draw.rows

    def flipped(self, *args):
        draws.append(self)
        first, *others = rows(self, *args)
        return [first._replace(error=0.5), *others] if len(draws) == 1 else [first, *others]

    monkeypatch.setattr(trial.Draw, "rows", flipped)
    assert judge.problem(ours, attention(ours)) is None
    assert len(set(map(id, draws))) == 2


def test_logits_that_are_nan_are_a_misfit_only_if_the_models_own_are_not():
    own, nan = np.array([1.0, -np.inf, 2.0]), np.full(3, np.nan)
    assert trial._distance(own, own) == 0
    assert trial._distance(nan, own) == np.inf
    assert trial._distance(own, nan) == trial._distance(nan, nan) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v2"])
def test_a_first_trial_of_tokens_is_enough_for_a_model_that_fits(monkeypatch, name):
    """It costs one forward of the model itself."""
    monkeypatch.setattr(trial, "_DRAWS", 1)
    monkeypatch.setattr(trial.Draw, "noise", property(lambda self: 1 / 0))
    assert not tiny.load(name).packed.by_segment


@pytest.mark.parametrize(
    "error", [RuntimeError("no room"), KernelError("gather_rows", ValueError("no room"))]
)
def test_a_failure_of_one_rank_is_one_of_all(monkeypatch, error):
    """The others must not wait for its rows."""
    model = tiny.build(config_of("llama"))

    def built_steps(fails, *_):
        if fails:
            raise error
        return iter(())

    def problem(ranks):
        judge = trial.Trial(model, tiny.VOCAB, ranks)
        try:
            return judge.problem(ranks.rank == 1, None)
        except KernelError as e:
            return f"{e.kernel} {e}"
        except RuntimeError as e:
            return str(e)

    monkeypatch.setattr(trial, "built_steps", built_steps)
    first, second = rank_threads.run(problem)
    assert first == second
    assert "no room" in first


@pytest.mark.parametrize("name", ["plamo", "mamba", "baichuan_m1", "recurrent_gemma"])
def test_a_model_that_a_mode_does_not_suit_is_no_fault(name, caplog):
    tiny.load(name)
    assert "a fault of vllm-metal-lite" not in caplog.text


def test_a_fault_of_ours_is_logged_with_its_traceback(monkeypatch, caplog):
    """The model starts in a slower mode."""
    monkeypatch.delattr("vllm_metal_lite.attention.sdpa.reference.execute_calls")
    assert "execute_calls" in tiny.load("llama").packed.by_segment
    assert "a fault of vllm-metal-lite: llama does not run packed" in caplog.text
    assert "Traceback" in caplog.text
    caplog.clear()


def test_a_mode_that_fits_is_tried_once(tmp_path, monkeypatch):
    """The second start runs the same mode, without a trial; changed files are tried again."""
    made = Mock(wraps=trial.Trial)
    monkeypatch.setattr(trial, "Trial", made)
    tiny.write_folder(tmp_path, "qwen3")
    first, second = (load(str(tmp_path)) for _ in range(2))
    assert made.call_count == 1
    assert second.packed.mode == first.packed.mode
    assert second.kernel_use(16) == first.kernel_use(16)
    load(str(tmp_path), dtype="bfloat16")
    assert made.call_count == 2
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    load(str(tmp_path))
    assert made.call_count == 3


@pytest.mark.parametrize("known", ["[]", '["no mode", null]', "{", '["packed", null]'])
def test_a_remembered_mode_that_does_not_run_is_tried_again(tmp_path, monkeypatch, known):
    """An unknown mode is ignored, as an unreadable finding is."""
    tiny.write_folder(tmp_path, "qwen3")
    expected = load(str(tmp_path)).packed.mode
    monkeypatch.setattr(trial, "_first_step", Mock(side_effect=RuntimeError("it does not run")))
    monkeypatch.setattr(trial.Findings, "known", defaultdict(lambda: known), raising=False)
    monkeypatch.setattr(trial.Findings, "__init__", lambda self: None)
    monkeypatch.setattr(trial.Findings, "add", lambda *args: None)
    assert load(str(tmp_path)).packed.mode == expected
