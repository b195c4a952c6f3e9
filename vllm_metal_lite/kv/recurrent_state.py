"""States of recurrent layers: one row per seat, for any context length.

Seats that last ran together share one array per layer and slot, with one row each.  While the same
seats run again, the next step reads that array without a copy.  When the set changes, its rows are
gathered once.  A pool of all seats would be simpler, but each step would copy it: MLX updates an
array in place only if nothing else reads it, and the previous step still does.

A segment at position 0 starts without a state, whatever its seat held before.  So rows need no
release when a request ends or is preempted; there is at most one per seat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_metal_lite.backend import mx

Key = tuple[int, int]  # (recurrent layer, slot of its state)


@dataclass(slots=True)
class StateRows:
    """Arrays (len(seats), ...), one row per seat."""

    seats: tuple[int, ...]
    arrays: dict[Key, mx.array] = field(default_factory=dict)

    def take(self, rows: Sequence[int]) -> "StateRows":
        """A copy with only these rows."""
        index = mx.array(np.array(rows, np.int32))
        seats = tuple(self.seats[r] for r in rows)
        return StateRows(seats, {key: a[index] for key, a in self.arrays.items()})


class SeatStates:
    """The states of all seats; a step reads and replaces some of them through `begin`.

    groups: the current states; restoring the old list undoes a `commit`.
    """

    def __init__(self) -> None:
        self.groups: list[StateRows] = []

    @property
    def arrays(self) -> list[mx.array]:
        return [a for g in self.groups for a in g.arrays.values()]

    @property
    def num_rows(self) -> int:
        return sum(len(g.seats) for g in self.groups)

    def begin(self, runs: Sequence[tuple[tuple[int, ...], bool]]) -> "StateStep":
        """Start a step in which the seats of each run advance together.

        runs: (seats, fresh) pairs; fresh: the seats start at position 0, without a state.
        Raises ValueError if a seat of a run that is not fresh has no state.
        """
        return StateStep(self, runs)


class StateStep:
    """One step over the states: reads old ones and sets new ones, which take effect at `commit`.

    A step that fails before `commit` changes nothing.
    """

    def __init__(self, states: SeatStates, runs: Sequence[tuple[tuple[int, ...], bool]]) -> None:
        self._states = states
        self._at = {s: (g, r) for g in states.groups for r, s in enumerate(g.seats)}
        self._new = [StateRows(seats) for seats, _ in runs]
        self._sources = [([], None) if fresh else self._locate(seats) for seats, fresh in runs]

    def _locate(self, seats: tuple[int, ...]) -> tuple[list[StateRows], mx.array | None]:
        """The groups that hold these seats, and their rows in the concatenated groups."""
        for seat in seats:
            if seat not in self._at:
                raise ValueError(f"the request at seat {seat} goes on, but its state is not known")
        groups = list({id(self._at[s][0]): self._at[s][0] for s in seats}.values())
        sizes = [len(g.seats) for g in groups]
        first = {id(g): sum(sizes[:i]) for i, g in enumerate(groups)}
        rows = [first[id(self._at[s][0])] + self._at[s][1] for s in seats]
        if rows == list(range(sum(sizes))):
            return groups, None
        return groups, mx.array(np.array(rows, np.int32))

    def get(self, run: int, key: Key) -> mx.array | None:
        """The state (B, ...) of a run's seats before this step, or None."""
        groups, rows = self._sources[run]
        if not groups or key not in groups[0].arrays:
            return None
        arrays = [g.arrays[key] for g in groups]
        joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        return joined if rows is None else joined[rows]

    def has(self, run: int, key: Key) -> bool:
        """Whether this step has set the state."""
        return key in self._new[run].arrays

    def set(self, run: int, key: Key, state: mx.array) -> None:
        """Set the new state (B, ...) of a run's seats."""
        self._new[run].arrays[key] = state

    def commit(self) -> None:
        ran = {seat for rows in self._new for seat in rows.seats}
        groups = list(self._new)
        for group in self._states.groups:
            left = [r for r, seat in enumerate(group.seats) if seat not in ran]
            if left:
                groups.append(group if len(left) == len(group.seats) else group.take(left))
        self._states.groups = groups
