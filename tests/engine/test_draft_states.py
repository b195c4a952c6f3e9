"""Drafts by the head of a model with recurrent layers: no token is computed twice, few slots change
no token, and the next turn starts within the answer."""

import pytest

from tests.engine.test_trained_heads import ByModel
from tests.support.engine.guesses import Guesses
from tests.support.engine.pool_accounts import check_accounts
from tests.support.models import tiny_models as tiny
from tests.support.models.trained_heads import Head, write_head
from vllm_metal_lite.config import MAX_MODEL_DRAFTS, EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.loader import load

SIZE = 16
LENGTH = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny.write_folder(tmp_path_factory.mktemp("model"), "qwen3_5")
    return load(str(write_head(path, Head("qwen3_5"))))


class Rigged(ByModel):
    """The head's drafts in every step.  A share, `right`, become the answers' tokens: a head of
    random weights is nearly always wrong."""

    def __init__(self, engine, answers, right):
        super().__init__(engine)
        self.answers, self.right, self.max_model_drafts = answers, right, MAX_MODEL_DRAFTS

    def _noted(self, wanted):
        drafts = super()._noted(wanted)
        for (request, _), draft in zip(wanted, drafts, strict=True):
            told = request.num_tokens - request.num_prompt_tokens
            answer = self.answers[int(request.request_id)][told:]
            for i, token in enumerate(answer[: len(draft)]):
                if self.random.random() < self.right:
                    draft[i] = token
        return drafts

    def _choose(self, *args):
        return 0, MAX_MODEL_DRAFTS


def drafting(model, answers, right, **options):
    """An engine, and the segments of its finished steps behind the prompts."""
    options = {"num_blocks": 64, "max_model_len": 110, "max_num_batched_tokens": 64, **options}
    options["num_speculative_tokens"] = MAX_MODEL_DRAFTS
    engine, segments = LLMEngine(model, EngineConfig(**options)), []
    engine.in_flight.speculator = Rigged(engine, answers, right)

    def look(out):
        segments.extend(s for s in out.segments if not s.is_prompt)
        check_accounts(engine.scheduler.kv, engine.scheduler.running)

    engine.on_step = look
    return engine, segments


@pytest.mark.parametrize(("name", "most"), [("qwen3_5", 6), ("rwkv7", 1)])
def test_modules_that_see_sequences_leave_one_state_before_drafts(name, most):
    """They read their weights once for each."""
    (prompt,), found = tiny.prompts(1, 5, 5, seed=4), set()
    answer = tiny.alone(tiny.native(name), prompt, 40)
    engine = tiny.engine(name, speculate="auto")
    engine.in_flight.speculator = Guesses(engine, {"0": answer})
    engine.on_step = lambda out: found.update(len(s.state.checkpoints) for s in out.segments)
    assert tiny.answers(engine, [prompt], tiny.greedy(40, ignore_eos=True)) == [answer]
    assert max(found) == most


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_no_token_is_computed_twice(model, right):
    prompts = tiny.prompts(3, 5, 40, seed=6)
    answers = tiny.all_alone("qwen3_5", prompts, LENGTH)
    engine, segments = drafting(model, answers, right)
    assert tiny.answers(engine, prompts, tiny.greedy(LENGTH, ignore_eos=True)) == answers
    assert all(s.known_end == s.num_computed + 1 for s in segments)
    drafted = [s for s in segments if s.draft_token_ids]
    assert any(s.end // SIZE > s.known_end // SIZE and s.end % SIZE for s in drafted)
    rows, metrics = sum(s.num_scheduled for s in segments), engine.metrics()
    assert rows == 3 * (LENGTH - 1) + metrics["draft_tokens"] - metrics["accepted_tokens"]
    assert metrics["accepted_tokens"] >= (right > 0) * 90


@pytest.mark.parametrize("length", [20, 31, 32, 33, 47, 48, 60])
def test_the_next_turn_starts_at_the_last_block_within_accepted_drafts(model, length):
    (prompt,), params = tiny.prompts(1, 20, 20, seed=1), tiny.greedy(length, ignore_eos=True)
    answers = tiny.all_alone("qwen3_5", [prompt], length)
    engine, _ = drafting(model, answers, 0.9, state_cache_gib=0.01)
    assert tiny.answers(engine, [prompt], params) == answers
    engine.in_flight.speculator = None
    turn = [*prompt, *answers[0], 5]
    done = tiny.ask(engine, turn, tiny.greedy(8))
    assert done.outputs[0].token_ids == tiny.alone(tiny.native("qwen3_5"), turn, 8)
    # The last token of an answer is never computed.
    assert done.num_cached_tokens == (20 + length - 1) // SIZE * SIZE


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
def test_few_slots_change_no_token(model, spare):
    """Also where a request is aborted, another loses its blocks, and steps fail."""
    prompts = tiny.prompts(5, 5, 40, seed=6)
    answers = tiny.all_alone("qwen3_5", prompts, LENGTH)
    gib = (spare + 0.5) * model.state_bytes / 2**30
    options = {"state_cache_gib": gib, "max_num_seqs": 4, "num_blocks": 16}
    engine, segments = drafting(model, answers, 0.7, **options)
    assert engine.scheduler.kv.states.num_blocks == 4 + spare
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, tiny.greedy(LENGTH, ignore_eos=True))
    done, steps, launch = {}, 0, engine.runner.execute

    def lost(*args, **how):
        raise RuntimeError("lost")

    while engine.has_unfinished_requests():
        steps += 1
        if steps == 9:
            engine.abort("2")
        engine.runner.execute = lost if steps in (7, 15) else launch
        done |= tiny.step(engine, RuntimeError)
    for i in (0, 1, 3, 4):
        assert done[str(i)].outputs[0].token_ids == answers[i]
    metrics = engine.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["draft_tokens"] > 20
    assert any(s.known_end > s.num_computed + 1 for s in segments)
