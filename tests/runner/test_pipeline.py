"""Steps in flight: one is ahead, with tokens that the host does not know."""

import gc
import queue
import threading
import time
import weakref
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.engine.runner_bench import RunnerBench
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN

PROMPTS = tiny.prompts(3, 4, 20, seed=3)
NUM_TOKENS = 12
EXPECTED = [tiny.alone(tiny.native("llama"), p, NUM_TOKENS) for p in PROMPTS]


class Bench(RunnerBench):
    def __init__(self):
        super().__init__(PROMPTS)
        self.computed = np.zeros(len(PROMPTS), np.int32)

    def launch(self):
        """Launch the next step of all prompts, up to the last token that the table has room for."""
        scheduled = self.inputs.num_tokens[self.rows] - self.computed
        batch = self.inputs.pack(self.rows, self.computed, scheduled)
        self.computed = self.computed + scheduled
        self.pipeline.begin(None)
        return self.pipeline.launch(batch)

    @property
    def answers(self):
        return [
            self.inputs.token_ids[row, len(p) : self.inputs.num_tokens[row]].tolist()
            for row, p in zip(self.rows, PROMPTS, strict=True)
        ]


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_the_same_one_step_ahead(ahead):
    bench = Bench()
    for _ in range(NUM_TOKENS):
        bench.launch()
        bench.pipeline.advance()
        assert [a[-1] for a in bench.answers] == [UNKNOWN_TOKEN] * 3
        assert len(bench.pipeline.steps) == 1
        if not ahead:
            bench.pipeline.finish()
    if ahead:
        bench.pipeline.finish()
    assert bench.answers == EXPECTED
    assert bench.pipeline.num_ahead == (NUM_TOKENS - 1 if ahead else 0)


def test_room_is_made_once():
    """`advance` may be called again without a launch between."""
    bench = Bench()
    bench.launch()
    for _ in range(3):
        bench.pipeline.advance()
    bench.pipeline.finish()
    assert bench.answers == [e[:1] for e in EXPECTED]


def test_a_step_whose_tokens_were_read_is_not_ahead_of_them():
    bench = Bench()
    for _ in range(3):
        assert bench.launch().token_ids is not None
        bench.pipeline.advance()
    assert bench.pipeline.num_ahead == 0


def test_another_thread_reads_what_this_one_goes_on_with():
    """As under vLLM's executor "mp"; the reader and the pipeline wait for the same steps."""
    bench, given, taken = Bench(), queue.Queue(), []

    def read():
        while (step := given.get()) is not None:
            taken.append(step.token_ids.tolist())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(NUM_TOKENS):
        given.put(bench.launch())
        bench.pipeline.advance()
    bench.pipeline.finish()
    given.put(None)
    reader.join()
    assert np.array(taken).T.tolist() == bench.answers == EXPECTED


def test_two_threads_do_not_wait_for_the_same_arrays_at_once(monkeypatch):
    bench, both, calls = Bench(), threading.Barrier(2), []
    result = bench.launch()
    monkeypatch.setattr(mx, "eval", lambda *_: (calls.append(1), time.sleep(0.1)))

    def wait():
        both.wait()
        result.wait()

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_failure_is_raised_where_the_step_is_waited_for():
    bench = Bench()
    bench.launch().wait = Mock(side_effect=RuntimeError("device lost"))
    bench.pipeline.advance()
    with pytest.raises(RuntimeError, match="device lost"):
        bench.pipeline.finish()
    bench.pipeline.clear()
    assert not bench.pipeline.steps


def test_a_step_that_is_over_leaves_nothing_to_the_garbage_collector():
    """A plugin that sleeps frees the store, so no object that holds it may outlive a step."""
    bench, seen = Bench(), []
    attention = bench.pipeline.runner.attention
    begin = attention.begin
    attention.begin = lambda *a: (b := begin(*a), seen.append(weakref.ref(b)))[0]
    gc.disable()
    try:
        for _ in range(3):
            bench.launch()
            bench.pipeline.advance()
        bench.pipeline.finish()
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
