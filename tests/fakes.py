"""A model without a model: wrong tokens follow from any wrong slot, block, share or lost write.

`FakeModel` keeps numbers where a real one keeps K and V, and is read and written as the real one
is: through the slots and block tables of a `ForwardBatch`, layer by layer, every row of a step
written before any is read.  `FakeEngine` is the engine's loop around it, without MLX.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from vllm_metal_lite.batch import ForwardBatch, InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.request import Request
from vllm_metal_lite.engine.scheduler import Scheduler, SchedulerOutput

VOCAB_SIZE = 1000
MAX_LEN = 4096
_EMPTY = -1
_MASK = (1 << 64) - 1
_A, _B = np.random.default_rng(0).integers(1, 1 << 63, (2, MAX_LEN), dtype=np.uint64) | np.uint64(1)


def _mix(x: Any) -> Any:
    """splitmix64's finaliser, of an array of uint64 or a Python int."""
    if isinstance(x, int):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=100_000)
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What FakeModel answers to a prompt that nothing else is running with."""
    tokens, first, second = list(prompt), 0, 0
    for i in range(len(prompt) + max_tokens - 1):
        first = (first + (tokens[i] + 1) * int(_A[i])) & _MASK
        second = (second + _mix(first) * int(_B[i])) & _MASK
        if i >= len(prompt) - 1:
            tokens.append(_mix(second) % VOCAB_SIZE)
    return tokens[len(prompt) :]


class FakeModel:
    """Two layers, each with a number a slot.

    Layer 0 stores a row's token and position; layer 1 a hash of all layer 0 up to that row, as a
    real K and V depend on all earlier tokens; the next token is a hash of all layer 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.positions = np.full((num_blocks, block_size), _EMPTY, np.int64)
        self.tokens = np.zeros((num_blocks, block_size), np.uint64)
        self.hashes = np.zeros((num_blocks, block_size), np.uint64)

    def poison(self, block_ids: list[int]) -> None:
        """Whoever reads these blocks before they are written fails."""
        self.positions[block_ids] = _EMPTY

    def __call__(self, batch: ForwardBatch) -> list[int]:
        """Run a step; returns a token for each terminal segment."""
        batch.validate(self.num_blocks)
        at = np.arange(batch.seq_lens.max())
        slots = batch.block_tables[:, at // batch.block_size] * batch.block_size
        slots = slots + at % batch.block_size
        seen = at < batch.seq_lens[:, None]
        segment = np.repeat(np.arange(batch.num_segments), np.diff(batch.cu_seqlens_q))

        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "a slot is written twice"
        self.positions.reshape(-1)[batch.slot_mapping] = batch.positions
        self.tokens.reshape(-1)[batch.slot_mapping] = batch.token_ids
        positions = self.positions.reshape(-1)[slots]
        assert (positions == at)[seen].all(), "a row reads what was never written, or moved"
        past = np.cumsum((self.tokens.reshape(-1)[slots] + np.uint64(1)) * _A[at], axis=1)

        self.hashes.reshape(-1)[batch.slot_mapping] = _mix(past[segment, batch.positions])
        past = np.cumsum(self.hashes.reshape(-1)[slots] * _B[at], axis=1)
        ends = past[batch.sample_segments, batch.seq_lens[batch.sample_segments] - 1]
        return (_mix(ends) % np.uint64(VOCAB_SIZE)).astype(int).tolist()


def fake_config(block_size: int = 4, **options: Any) -> EngineConfig:
    """EngineConfig with blocks smaller than it allows: small cases then have more boundaries."""
    threshold = options.pop("long_prefill_token_threshold", 0)
    config = EngineConfig(**options)
    object.__setattr__(config, "block_size", block_size)
    object.__setattr__(config, "long_prefill_token_threshold", threshold)
    return config


class StepFailed(Exception):
    """Raised by a step that was told to fail."""


class FakeEngine:
    """Scheduler, InputBatch and FakeModel in the engine's loop."""

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int = 512) -> None:
        self.scheduler = Scheduler(config, num_blocks, max_model_len)
        self.inputs = InputBatch(config.max_num_seqs, max_model_len, config.block_size)
        self.model = FakeModel(num_blocks, config.block_size)
        self.block_size = config.block_size
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}  # all that were ever added
        self.seated: list[Request] = []
        self.unfinished: dict[str, Request] = {}

    def add(self, prompt: list[int], max_tokens: int = 4, **options: Any) -> Request:
        number = len(self.requests)
        request_id = options.pop("request_id", f"r{number}")
        request = Request(request_id, prompt, max_tokens, **{"arrival": number, **options})
        self.scheduler.add(request)
        self.requests[request_id] = self.unfinished[request_id] = request
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.unfinished.pop(request.request_id, None)
        self._unseat(request)

    def schedule(self) -> SchedulerOutput:
        """The first half of a step: decide it, and give out rows and blocks."""
        out = self.scheduler.schedule()
        for request in out.preempted:
            self._unseat(request)
        for request in out.admitted:
            request.req_index = self.inputs.add(request.token_ids, request.num_prompt_tokens)
            self.seated.append(request)
        for segment in out.segments:
            new = list(segment.new_block_ids)
            self.inputs.append_blocks(segment.request.req_index, new)
            shared = (
                segment.num_computed // self.block_size if segment.request in out.admitted else 0
            )
            self.model.poison(new[shared:])
        return out

    def execute(self, out: SchedulerOutput, fail: bool = False) -> None:
        """The second half: run it, and take note of the tokens.  fail: nothing is written."""
        if fail:
            for segment in out.segments:
                self._unseat(segment.request)
            self.scheduler.rollback(out)
            raise StepFailed
        rows = np.array([s.request.req_index for s in out.segments])
        batch = self.inputs.pack(
            rows,
            np.array([s.num_computed for s in out.segments]),
            np.array([s.num_scheduled for s in out.segments]),
        )
        tokens = self.model(batch)
        terminal = [out.segments[i].request for i in batch.sample_segments]
        self.inputs.append_tokens(rows[batch.sample_segments], np.array(tokens, np.int32))
        self.scheduler.update(out, tokens)
        for request in terminal:
            room = self.max_model_len - request.num_prompt_tokens
            if len(request.output_token_ids) >= min(request.max_tokens, room):
                self.abort(request)

    def step(self) -> SchedulerOutput:
        out = self.schedule()
        self.execute(out)
        return out

    def run(self, max_steps: int = 10_000) -> list[SchedulerOutput]:
        """Step until every request has finished."""
        steps = []
        while self.scheduler.has_unfinished():
            assert len(steps) < max_steps, "requests do not finish"
            steps.append(self.step())
            assert not steps[-1].is_empty, "every request waits"
        return steps

    def check_blocks(self) -> None:
        """The pool's account, the requests' blocks and the block tables in use agree."""
        self.scheduler.pool.check([r.block_ids for r in self.requests.values()])
        for request in self.seated:
            row, held = request.req_index, len(request.block_ids)
            assert self.inputs.num_blocks[row] == held
            assert self.inputs.block_tables[row, :held].tolist() == request.block_ids
            assert self.inputs.num_tokens[row] == request.num_tokens
        waiting = [r for r in self.requests.values() if r.req_index is None]
        assert not any(r.block_ids for r in waiting), "a request without a seat has blocks"

    def _unseat(self, request: Request) -> None:
        if request.req_index is not None:
            self.inputs.remove(request.req_index)
            self.seated.remove(request)
            request.req_index = None


def expected(request: Request, max_model_len: int) -> list[int]:
    """The tokens that a request of a FakeEngine must answer."""
    room = max_model_len - request.num_prompt_tokens
    return alone(tuple(request.prompt_token_ids), min(request.max_tokens, room))
