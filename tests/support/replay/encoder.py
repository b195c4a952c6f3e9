"""MLX's Metal command encoder, replayed: which launches does it order, and when does it commit?

Followed: `CommandEncoder` of mlx/backend/metal/device.cpp (`set_input_array`, `set_output_array`,
`register_output_array`, `maybeInsertBarrier`, `end_encoding`, `needs_commit`, `commit`) and
`gpu::eval`, `gpu::finalize` of mlx/backend/metal/eval.cpp, at commit 846d176 of 2026-08-22 (0.32.2
and later).  The headers of 0.32.4 declare the same members; `end_encoding` has one more parameter,
false by default.

Facts that decide the order:

- Commands of one encoder run concurrently.  A memory barrier puts all commands before it ahead of
  all commands after it.  MLX inserts one if a launch takes a buffer that was written, or writes a
  buffer that was taken, since the last barrier.
- Buffers have no hazard tracking.  An encoder waits for the fence of the encoder that last wrote a
  buffer which it takes.  Nothing else orders two encoders, not even two command buffers.
- A command buffer ends after a primitive that made it exceed `Limits`, and at the end of an eval.
  Sizes are counted in elements, once per buffer and command buffer, for all of the buffer that the
  array spans.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple


class Limits(NamedTuple):
    """MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER (2^20 elements).

    MLX's defaults: 40 and 40 on base and Pro chips, 50 and 50 on Max and Ultra, 20 and 40 on
    phones.
    """

    ops: int = 40
    mb: int = 40


class Truth(NamedTuple):
    """Buffers that a launch reads and writes.  turn: its place in the program."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    turn: int = 0


NOTHING = Truth()


@dataclass(frozen=True)
class Launch:
    """One dispatch.  encoder: its number.  epoch: the barriers of that encoder before it.

    truth: what the kernel touches, whatever it declares.
    """

    name: str
    encoder: int
    epoch: int
    truth: Truth


class Encoder:
    """Takes what primitives declare; notes launches, barriers, fences and commits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.launches: list[Launch] = []
        self.barriers = self.commits = 0
        self._encoders = 0
        self._is_open = self._concurrent = self._needs_barrier = False
        self._epoch = 0
        self._ops = self._elements = 0
        self._prev_inputs: set[int] = set()
        self._prev_outputs: set[int] = set()
        self._next_inputs: set[int] = set()
        self._next_outputs: set[int] = set()
        self._concurrent_outputs: set[int] = set()
        self._all_inputs: set[int] = set()
        self._all_outputs: set[int] = set()
        self._temporaries: set[int] = set()
        self._fence_of: dict[int, int] = {}  # buffer -> the encoder that wrote it last
        self._waits: list[int] = []  # encoders that had ended when the host continued
        self._behind: list[int] = []  # encoder -> the encoders before it, as bits

    # What a primitive calls

    def take(self, buffer: int, elements: int) -> None:
        self._open()
        if buffer not in self._all_inputs:
            self._all_inputs.add(buffer)
            self._elements += elements
        self._next_inputs.add(buffer)
        self._needs_barrier |= buffer in self._prev_outputs

    def give(self, buffer: int, elements: int) -> None:
        self.take(buffer, elements)
        self._all_outputs.add(buffer)
        if self._concurrent:
            self._concurrent_outputs.add(buffer)
        else:
            self._next_outputs.add(buffer)
            self._needs_barrier |= buffer in self._prev_inputs

    def add_temporary(self, buffer: int) -> None:
        self._temporaries.add(buffer)

    def dispatch(self, name: str, truth: Truth = NOTHING) -> None:
        self._open()
        if self._needs_barrier:
            self._needs_barrier = False
            self._epoch += 1
            self.barriers += 1
            self._prev_inputs, self._prev_outputs = self._next_inputs, self._next_outputs
        else:
            self._prev_inputs |= self._next_inputs
            self._prev_outputs |= self._next_outputs
        self._next_inputs, self._next_outputs = set(), set()
        self._ops += 1
        number = self._encoders - 1
        self.launches.append(Launch(name, number, self._epoch, truth))

    @contextmanager
    def concurrently(self) -> Iterator[None]:
        """Launches of one primitive that write different parts of one buffer."""
        self._concurrent = True
        yield
        self._concurrent = False
        self._prev_outputs |= self._concurrent_outputs
        self._concurrent_outputs = set()

    # What an evaluation calls

    def end_primitive(self) -> None:
        if self._ops > self.limits.ops or self._elements >> 20 > self.limits.mb:
            self._commit()

    def end_eval(self) -> None:
        self._commit()

    def synchronize(self) -> None:
        """The host commits, and waits for everything."""
        self._commit()
        self._waits.append(self._encoders)

    def _open(self) -> None:
        if not self._is_open:
            self._is_open, self._epoch = True, 0
            self._encoders += 1

    def _commit(self) -> None:
        self._end_encoding()
        self.commits += 1
        self._ops = self._elements = 0

    def _end_encoding(self) -> None:
        if not self._is_open:
            return
        self._all_inputs -= self._temporaries
        self._all_outputs -= self._temporaries
        behind, me = 0, self._encoders - 1
        for buffer in self._all_inputs & self._fence_of.keys():
            other = self._fence_of[buffer]
            behind |= 1 << other | self._behind[other]
        self._behind.append(behind)
        self._fence_of |= dict.fromkeys(self._all_outputs, me)
        self._is_open = self._needs_barrier = self._concurrent = False
        inputs = self._prev_inputs, self._next_inputs, self._all_inputs
        outputs = self._prev_outputs, self._next_outputs, self._all_outputs
        for buffers in (*inputs, *outputs, self._concurrent_outputs, self._temporaries):
            buffers.clear()

    # The proof

    def is_ordered(self, first: Launch, second: Launch) -> bool:
        """Whether `second`, encoded later, cannot run before the end of `first`."""
        if first.encoder == second.encoder:
            return first.epoch < second.epoch
        if any(first.encoder < ended <= second.encoder for ended in self._waits):
            return True
        return bool(self._behind[second.encoder] >> first.encoder & 1)

    def conflicts(self) -> Iterator[tuple[Launch, Launch]]:
        """Pairs of launches, as encoded, that touch a buffer which one of them writes."""
        touching = [launch for launch in self.launches if launch.truth is not NOTHING]
        for i, second in enumerate(touching):
            for first in touching[:i]:
                touched = second.truth.reads | second.truth.writes
                if first.truth.writes & touched or first.truth.reads & second.truth.writes:
                    yield first, second

    def faults(self) -> list[tuple[Launch, Launch]]:
        """The conflicts that nothing orders, and those that are ordered against the program."""
        return [
            (first, second)
            for first, second in self.conflicts()
            if first.truth.turn > second.truth.turn or not self.is_ordered(first, second)
        ]
