"""The benchmark of pictures: no run knows another's pictures, and mlx-vlm may be missing."""

from unittest.mock import patch

import pytest

from tools.bench.lib.loads import Wave, WaveLoad
from tools.bench.lib.metrics import measure
from tools.bench.lib.mlx_vlm import empty_model
from tools.bench.lib.models import random_model
from tools.bench.lib.pictures import Pictures, SeeingEngine, random_eyes
from tools.bench.pictures import Loads
from vllm_metal_lite import EngineConfig, MetalLiteError
from vllm_metal_lite.backend import mx
from vllm_metal_lite.benchmark import Run, drive, native


@pytest.fixture(scope="module")
def ours() -> SeeingEngine:
    model = random_model("qwen3-vl-tiny")
    eyes = random_eyes(model.config, mx.float32, None, native(model))
    config = EngineConfig(max_num_seqs=8, max_model_len=400, num_blocks=400, speculate="off")
    return SeeingEngine(model, config, Pictures(model.config, 64), eyes)


def test_a_run_computes_its_pictures_and_a_second_turn_computes_none(ours: SeeingEngine) -> None:
    load, runs = Loads(ours.pictures, 2).turns, list[Run]()
    tower = type(ours.engine.eyes.tower)
    with patch.object(tower, "__call__", autospec=True, side_effect=tower.__call__) as called:
        for turn in range(2):
            runs.append(drive(ours, load))
            assert called.call_count == turn + 1
    assert runs[0].tokens == runs[1].tokens
    values = measure(load, runs[0])
    assert values["cached_tokens"] == 208  # 13 blocks of 211 computed tokens
    assert values["later_ttft_median"] > 0


def test_gaps_of_decodes_while_the_prompts_of_newcomers_are_computed() -> None:
    """A token every 10 ms; while four newcomers come, one gap of 50."""
    times = [0.01 * i for i in range(1, 21)] + [0.25, 0.26]
    run = Run(
        [0.0] + [0.2] * 4,
        [times, *([0.25, 0.26] for _ in range(3)), [0.26, 0.27]],
        [[]] * 5,
        seconds=0.27,
    )
    waves = [Wave([[1]], [22]), *(Wave([[1]] * n, [2] * n) for n in (1, 3))]
    values = measure(WaveLoad(waves, ends_with_last_wave=True), run)
    assert values["idle_gap_median"] == pytest.approx(0.01)
    assert values["busy_gap_worst"] == pytest.approx(0.05)
    assert values["newcomer_ttft"] == pytest.approx(0.06)


def test_without_mlx_vlm_the_reason_is_one_line(tmp_path) -> None:
    with pytest.raises(MetalLiteError, match="is not the package mlx_vlm"):
        empty_model({"model_type": "qwen3_vl"}, tmp_path)
