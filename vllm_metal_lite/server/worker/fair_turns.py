"""Turns of requests, so that a pile of one client does not keep all others waiting.

A client's requests get consecutive turns, and a newcomer gets the turn that is being served: its
request passes those of the pile that are further back.  Turns only grow, so no request waits
forever.  (Start-time fair queueing, where each request counts one.)
"""

from collections.abc import Hashable, Iterable


class FairTurns:
    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}  # by client

    def turn(self, client: Hashable, unfinished: Iterable[int]) -> int:
        """The turn of a client's next request.  unfinished: turns of all unfinished requests."""
        served = min(unfinished, default=None)
        if served is None:
            self._last.clear()
            served = 0
        self._last = {c: last for c, last in self._last.items() if last >= served}
        turn = self._last[client] = max(served, self._last.get(client, -1) + 1)
        return turn
