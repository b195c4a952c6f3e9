"""A step by batch and context: real decodes over contexts that nobody computed."""

import sys

from tools.bench import profile_step
from tools.bench.lib.models import random_model
from vllm_metal_lite import EngineConfig, LLMEngine


def test_the_model_runs_decodes_alone():
    config = EngineConfig(num_blocks=40, max_num_seqs=3, max_model_len=200)
    engine, steps = LLMEngine(random_model("128x2"), config), []
    runner = engine.pipeline.runner
    execute = runner.execute

    def noting(batch, *args, **kwargs):
        steps.append((batch.num_segments, batch.num_tokens, int(batch.seq_lens.min())))
        return execute(batch, *args, **kwargs)

    runner.execute = noting
    profile_step.decoding(engine, 3, 40)
    assert {(segments, tokens) for segments, tokens, _ in steps} == {(3, 3)}
    assert steps[0][2] == 42  # the first decode is launched beside the end of the prompts
    assert engine.pipeline.runner is runner


def test_a_row_for_each_batch_and_context_that_fits(monkeypatch, capsys):
    words = "--only glm-4.7-flash-4 --tiny --batch 1 2 --context 40 100000"
    monkeypatch.setattr(sys, "argv", ["profile_step", *words.split()])
    assert profile_step.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["| 1", "| 2"]
    assert all(float(row[2]) > 0 for row in rows)
