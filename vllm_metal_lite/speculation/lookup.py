"""Drafts by lookup: the tokens that followed when the context last ended like this.

A request that edits a file or quotes its prompt repeats long parts of its own tokens.  The more
tokens match, the longer the draft.  The method is prompt lookup decoding (Saxena 2023).
"""

import numpy as np

MIN_MATCH = 3  # two tokens match too often by chance
_MAX_MATCH = 32
_MAX_EDIT = 2  # newest tokens that may be an edit
_MAX_PLACES = 64  # the latest matching places, which are compared


def look_up(token_ids: np.ndarray, max_drafts: int) -> np.ndarray:
    """Up to max_drafts tokens that probably follow token_ids; both are (n,) int32.

    They follow the longest match of the last tokens; of equal matches, the latest.  If nothing
    matches, the text may be edited here: then the tokens before the newest one or two are matched.
    """
    if max_drafts < 1:
        return token_ids[:0]
    for skipped in range(_MAX_EDIT + 1):
        following, length = _match(token_ids, skipped)
        if length:
            start = _after_edit(following, skipped, token_ids[-1]) if skipped else 0
            # If fewer tokens follow the match than are wanted, they are repeated: the text seems to
            # be periodic.
            return np.resize(following[start:], min(max_drafts, 2 * length))
    return token_ids[:0]


def _after_edit(following: np.ndarray, skipped: int, newest: int) -> int:
    """The number of tokens after a match that an edit of the last `skipped` tokens replaces.

    If the newest token occurs shortly after the match, the edit ends there.  Otherwise the newest
    tokens replace as many others.
    """
    same = np.flatnonzero(following[:-1][: skipped + 2] == newest)
    return int(same[0]) + 1 if len(same) else skipped


def _match(token_ids: np.ndarray, skipped: int) -> tuple[np.ndarray, int]:
    """Match all but the last `skipped` tokens.  Returns the tokens after the best match, and the
    length of the match, which is 0 if there is none."""
    n = len(token_ids) - skipped
    if n <= MIN_MATCH:
        return token_ids[:0], 0
    known = token_ids[:n]
    places = np.flatnonzero(known[MIN_MATCH - 1 : -1] == known[-1]) + MIN_MATCH - 1
    for i in range(1, MIN_MATCH):
        if len(places):
            places = places[known[places - i] == known[-1 - i]]
    if not len(places):
        return token_ids[:0], 0
    places = places[-_MAX_PLACES:]
    back = np.arange(min(_MAX_MATCH, n - 1))
    at = places[:, None] - back
    same = (known[at] == known[n - 1 - back]) & (at >= 0)
    lengths = np.cumprod(same, axis=1).sum(1)
    best = len(places) - 1 - int(lengths[::-1].argmax())
    return token_ids[places[best] + 1 :], int(lengths[best])
