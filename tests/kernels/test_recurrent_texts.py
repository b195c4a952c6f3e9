"""The texts of the kernels of recurrent layers at the shapes of real models: what Apple's compiler
would refuse."""

import pytest

from metal.host import HostError, installed, mlx_source
from tests.support.recurrent_shapes import CASES

pytest.importorskip("ziglang", reason="the strict front end needs clang")


def text_of(case, monkeypatch):
    texts = []
    generate = mlx_source.generated_source

    def only_the_text(*arguments):
        texts.append(generate(*arguments))
        raise HostError("only the text is wanted")

    monkeypatch.setattr(mlx_source, "generated_source", only_the_text)
    with installed(), pytest.raises(HostError, match="only the text"):
        CASES[case]()
    return texts[0]


@pytest.mark.parametrize("case", CASES)
def test_accepted_by_the_strict_front_end(case, monkeypatch):
    from metal.host.strict import check

    text = text_of(case, monkeypatch)
    assert f"metal_lite_{case.split()[0]}" in text
    assert check(text) == []
