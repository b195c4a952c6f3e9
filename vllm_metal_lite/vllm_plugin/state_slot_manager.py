"""Slots of recurrent states, as a group of vLLM's KV cache with its own block pool.

vLLM's block manager takes the ids of state blocks and of K and V blocks from one pool, so that each
id means one page of bytes.  A state is as large as the K and V of hundreds of tokens, so vLLM
makes all blocks that long.  Here the states' ids come from a second pool, so blocks of K and V stay
small, and we choose the number of slots:

    id of a state's block     0                    1   2   3  ...  num_slots
    slot of the StateStore    vLLM's null block    0   1   2  ...  num_slots - 1

Runs in the scheduler's process too, so it never imports MLX.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

# One request may hold four slots: the initial states of two steps in flight, a checkpoint, and the
# final state.
MAX_SLOTS_PER_REQUEST = 4


def has_own_pool() -> bool:
    """Whether this vLLM's blocks know their pool (0.30 and later), so that states can have one of
    their own."""
    return hasattr(KVCacheBlock, "pool")


@dataclass(frozen=True)
class StateSlotSpec(MambaSpec):
    """A layer of states, which takes no bytes of vLLM's pool for K and V.

    num_slots: the slots of the `StateStore`, for all recurrent layers together.
    """

    num_slots: int = 0

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return 0


def state_slot_spec(num_slots: int, block_size: int, page_bytes: int) -> StateSlotSpec:
    """page_bytes: the size of an attention layer's block; vLLM needs pages of equal size."""
    return StateSlotSpec(
        block_size=block_size,
        shapes=((page_bytes,),),
        dtypes=(torch.uint8,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,  # a step may keep the state at a block's end within it
        prefill_checkpoint_alignment=1,
        num_slots=num_slots,
    )


class StateSlotManager(MambaManager):
    """vLLM's manager of aligned states, over a pool of `num_slots` blocks.

    vLLM retains states at the end of a prompt, and of a prefix that two prompts share.  Here each
    request also retains its latest state at a block's end, from which the next turn continues.
    With blocks of 4, a prompt of 10 tokens and an answer of 7:

        tokens computed      10      12        16
        retained states      8       8, 12     8, 16       16 takes the place of 12
    """

    def __init__(self, kv_cache_spec: StateSlotSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, **kwargs)
        self._shared_pool = block_pool
        self.block_pool = BlockPool(
            kv_cache_spec.num_slots + 1, self.enable_caching, block_pool.hash_block_size
        )
        self._null_block = self.block_pool.null_block
        # By request: the block of its latest state and the block's name, unless vLLM itself
        # retains this state.
        self._latest: dict[str, tuple[KVCacheBlock, Any]] = {}

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """0, since states use no shared blocks; more blocks than exist if too few slots are free.

        A request holds a second slot in the steps that pass the end of a block.  To avoid
        preemption then, a new request leaves one slot free for every four running requests.
        """
        needed = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        if request_id not in self._allocated_block_reqs:
            needed += len(self._allocated_block_reqs) // 4
        if needed > self.block_pool.get_num_free_blocks():
            return self._shared_pool.num_gpu_blocks + 1
        return 0

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Name the blocks up to num_tokens, a multiple of the size of a block."""
        req_id, boundaries = request.request_id, [*replay_boundaries]
        before = self.num_cached_block.get(req_id)
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=[*boundaries, num_tokens]
        )
        if retention_interval is None or self.num_cached_block.get(req_id) == before:
            return  # vLLM retains all states, or no block is new
        block = self.req_to_blocks[req_id][num_tokens // self.block_size - 1]
        if block.block_hash is None:  # the null block: no state was kept here
            return
        self._forget_latest(req_id)
        boundaries = [position // self.block_size * self.block_size for position in boundaries]
        at_interval = retention_interval > 0 and num_tokens % retention_interval == 0
        if not at_interval and num_tokens not in [*boundaries, request.shared_prefix_boundary]:
            self._latest[req_id] = block, block.block_hash

    def _forget_latest(self, req_id: str) -> None:
        """Take the name of a request's latest state away, so that its block is used next."""
        block, name = self._latest.pop(req_id, (self._null_block, None))
        if name is None or block.block_hash != name:  # the block has gone to others
            return
        self.block_pool.evict_blocks({block.block_id})
        if block.ref_cnt == 0:
            self.block_pool.free_block_queue.remove(block)
            self.block_pool.free_block_queue.prepend_n([block])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._latest.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


def register_state_slots() -> None:
    """Tell vLLM's scheduler which manager serves the slots."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry.register(StateSlotSpec, StateSlotManager)
