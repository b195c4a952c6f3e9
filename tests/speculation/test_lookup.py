"""Which tokens probably follow, by what followed before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal_lite.speculation.lookup import MIN_MATCH, look_up


def look(tokens, most=99):
    return look_up(np.array(tokens, np.int32), most).tolist()


@pytest.mark.parametrize(
    ("tokens", "most", "following"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 99, [4, 5, 6, 7, 8, 9]),  # twice the match
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5]),  # of equal matches the latest
        ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], 1, [4]),  # the longest match
        ([1, 2, 9, 1, 2], 9, []),  # too short
        ([7, 7, 7, 7, 7], 6, [7] * 6),  # a match that overlaps the end
        ([5, 1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([1, 2, 3], 9, []),
        ([], 9, []),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
    ],
)
def test_examples(tokens, most, following):
    assert look(tokens, most) == following


def matches_of(tokens):
    """The length of each match of the last tokens, by its end."""
    n = len(tokens)
    matches = {}
    for end in range(1, n):
        length = 0
        while length < min(end, 32) and tokens[end - 1 - length] == tokens[n - 1 - length]:
            length += 1
        if length >= MIN_MATCH:
            matches[end] = length
    return matches


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20))
def test_a_draft_follows_the_longest_match(tokens, most):
    searched = (matches_of(tokens[: len(tokens) - skipped]) for skipped in range(3))
    skipped, matches = next(((i, found) for i, found in enumerate(searched) if found), (0, {}))
    found = look(tokens, most)
    if not matches:
        assert found == []
        return
    best = max(matches.values())
    end = max(at for at, length in matches.items() if length == best)
    close = tokens[end : min(end + skipped + 2, len(tokens) - 1)]
    if skipped and tokens[-1] in close:
        skipped = close.index(tokens[-1]) + 1
    following = tokens[end + skipped :]
    following = [following[i % len(following)] for i in range(min(most, 2 * best))]
    assert found == following


@pytest.mark.parametrize(
    ("new", "replaced"),
    [
        (lambda text, at: [99], 1),
        (lambda text, at: [98, 99], 2),
        (lambda text, at: [text[at + 1]], 2),  # one was deleted
        (lambda text, at: [text[at + 2]], 3),  # two
        (lambda text, at: [99, text[at]], 1),  # one was inserted
    ],
)
@given(text=st.permutations(range(40)), at=st.integers(MIN_MATCH, 36))
def test_a_draft_continues_behind_an_edit(new, replaced, text, at):
    tokens = [*text, *text[:at], *new(text, at)]
    following = (text[at + replaced :] + tokens[len(text) :])[: 2 * min(at, 32)]
    assert look(tokens) == np.resize(following, 2 * min(at, 32)).tolist()
