"""Where a prompt diverges from a model's recent prompts: from there on it is computed again."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST = 64  # sequences that are remembered
_SHOWN = 200  # characters of a message that are looked for


@dataclass(frozen=True)
class Divergence:
    """token: the first that differs.  where: in words, such as "message 3, system"."""

    token: int
    where: str

    def json(self) -> dict[str, Any]:
        """As fields of `usage`."""
        return {"diverged_at": self.token, "diverged_in": self.where}


class RecentPrompts:
    """Prompts and their answers, as token ids.  Threads may share it."""

    def __init__(self) -> None:
        self._sequences: deque[np.ndarray] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a sequence, and forget those that it continues."""
        new = np.array(token_ids, np.int32)
        with self._lock:
            old = [s for s in self._sequences if _num_common(s, new) < len(s)]
            self._sequences.clear()
            self._sequences.extend([*old, new])

    def diverges_at(self, token_ids: Sequence[int]) -> int | None:
        """Where a prompt leaves the sequence with the longest common beginning.

        None: the prompt continues that sequence, or shares no token with any.
        """
        new = np.array(token_ids, np.int32)
        with self._lock:
            found = [(_num_common(s, new), -len(s)) for s in self._sequences]
        common, length = max(found, default=(0, 0))
        return common if 0 < common < min(-length, len(new)) else None


def find_divergence(
    recent: RecentPrompts,
    token_ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    decode: Callable[[Sequence[int]], str],
) -> Divergence | None:
    """Where a conversation's prompt diverges from recent ones, in its tokens and messages."""
    at = recent.diverges_at(token_ids)
    if at is None:
        return None
    before, end, index = decode(token_ids[:at]), 0, 0
    for i, message in enumerate(messages):
        content = str(message.get("content") or "").strip()[:_SHOWN]
        found = before.find(content, end) if content else -1
        if found >= 0:
            end, index = found + len(content), i + 1
    if index == len(messages):
        return Divergence(at, "behind the last message")
    return Divergence(at, f"message {index}, {messages[index].get('role')}")


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length
