"""A step's arrays come to the device as they were, in whatever way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from vllm_metal_lite import backend
from vllm_metal_lite.attention.upload import upload

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5)


@pytest.mark.parametrize("device", ["cuda", "metal"])
@given(SHAPES, st.randoms(use_true_random=False))
def test_every_array_of_the_tree(device, shapes, random):
    arrays = [
        np.array([random.randint(-9, 9) for _ in range(int(np.prod(s)))], np.int32).reshape(s)
        for s in shapes
    ]
    tree = [arrays[0], None, [None, arrays[1:]]]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(backend, "name", lambda: device)
        on_device = upload(tree)
    assert on_device[1] is on_device[2][0] is None
    found = [a for _, a in tree_flatten(on_device) if a is not None]
    for array, expected in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_nothing_is_nothing(monkeypatch, device):
    monkeypatch.setattr(backend, "name", lambda: device)
    assert upload([None, [None]]) == [None, [None]]
