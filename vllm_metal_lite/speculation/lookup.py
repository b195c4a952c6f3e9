"""Drafts by lookup: what followed the last time that the context ended like this.

A request that edits a file or quotes its prompt repeats long parts of its own tokens.  The more
tokens match, the longer the draft.  The method is prompt lookup decoding (Saxena 2023).
"""

import numpy as np

MIN_MATCH = 3  # two tokens match too often by chance
_MAX_MATCH = 32
_MAX_PLACES = 64  # matching places that are compared, the latest


def look_up(token_ids: np.ndarray, most: int) -> np.ndarray:
    """The tokens that probably follow token_ids, (n,) int32: at most `most`, perhaps none.

    They follow the longest match of the last tokens; of equal matches, the latest.  If nothing
    matches, the newest token may replace another: then the tokens before it are matched.
    """
    if most < 1:
        return token_ids[:0]
    following, length = _match(token_ids, 0)
    if not length:
        following, length = _match(token_ids, 1)
    # A match that overlaps the end repeats itself.
    return np.resize(following, min(most, 2 * length))


def _match(token_ids: np.ndarray, skipped: int) -> tuple[np.ndarray, int]:
    """What follows the best match of all but the last `skipped` tokens and as many tokens behind
    it, and the length of the match; 0: none."""
    n = len(token_ids) - skipped
    if n <= MIN_MATCH:
        return token_ids[:0], 0
    known = token_ids[:n]
    a, b, c = known[-MIN_MATCH:]
    ends = known[MIN_MATCH - 1 : -1] == c
    ends &= known[1:-2] == b
    ends &= known[:-3] == a
    places = np.flatnonzero(ends)[-_MAX_PLACES:] + MIN_MATCH - 1
    if not len(places):
        return token_ids[:0], 0
    back = np.arange(min(_MAX_MATCH, n - 1))
    at = places[:, None] - back
    same = (known[at] == known[n - 1 - back]) & (at >= 0)
    lengths = np.cumprod(same, axis=1).sum(1)
    best = len(places) - 1 - int(lengths[::-1].argmax())
    return token_ids[places[best] + 1 + skipped :], int(lengths[best])
