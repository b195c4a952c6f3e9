"""Embeddings by mlx-lm's own module, one prompt at a time, and how close others must be."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.packed import body_of


def alone(model, prompt, pooling: str = "last") -> np.ndarray:
    """The normalised embedding of a prompt, without a cache."""
    hidden = np.array(body_of(model)(mx.array([prompt]))[0].astype(mx.float32))
    hidden = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    return hidden / np.linalg.norm(hidden)


def compare(found, wanted) -> None:
    """Assert that embeddings in float32 agree, by their cosine and value by value."""
    for one, other in zip(found, wanted, strict=True):
        assert one @ other > 0.9999
        np.testing.assert_allclose(one, other, atol=1e-5)
