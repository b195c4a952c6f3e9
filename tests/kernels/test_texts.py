"""How many texts a serving session makes Metal compile; no batch size has texts of its own.

docs/kernels.md has the table.
"""

import re

import pytest

from tests.support.kernels.serving_session import MODELS, PATHS, Session, count

# An input in the constant address space, except for the shapes that MLX adds.
CONSTANT = re.compile(r"const constant \w+\* (\w+) ")
TEXTS = {
    "Qwen3-0.6B": {"gather": 18, "varlen": 16, "gather, skinny_gemm": 37},
    "Gemma3-4B": {"gather": 28, "varlen": 26, "gather, skinny_gemm": 48},
    "Llama-3.2-1B": {"gather": 18, "varlen": 16, "gather, skinny_gemm": 35},
}


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", MODELS)
def test_texts_of_a_session(model, path):
    texts = Session(model, *PATHS[path]).texts()
    constant = {name for _, text, _ in texts for name in CONSTANT.findall(text)}
    # Of a shared prefix, `tiles` is one number.
    assert {name for name in constant if not name.endswith("_shape")} <= {"tiles"}
    assert len(texts) == TEXTS[model][path], count(texts)
