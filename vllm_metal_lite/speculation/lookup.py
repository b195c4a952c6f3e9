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

    They follow the longest match of the last tokens; of equal matches, the latest.
    """
    n = len(token_ids)
    if n <= MIN_MATCH or most < 1:
        return token_ids[:0]
    a, b, c = token_ids[-MIN_MATCH:]
    ends = token_ids[MIN_MATCH - 1 : -1] == c
    ends &= token_ids[1:-2] == b
    ends &= token_ids[:-3] == a
    places = np.flatnonzero(ends)[-_MAX_PLACES:] + MIN_MATCH - 1
    if not len(places):
        return token_ids[:0]
    back = np.arange(min(_MAX_MATCH, n - 1))
    at = places[:, None] - back
    same = (token_ids[at] == token_ids[n - 1 - back]) & (at >= 0)
    lengths = np.cumprod(same, axis=1).sum(1)
    best = len(places) - 1 - int(lengths[::-1].argmax())
    following = token_ids[places[best] + 1 :]
    # A match that overlaps the end repeats itself.
    return np.resize(following, min(most, 2 * int(lengths[best])))
