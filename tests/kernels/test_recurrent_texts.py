"""The texts of the kernels of recurrent layers at the shapes of real models: what Apple's compiler
would refuse."""

import pytest

from tests.support.kernels.production_shapes import RECURRENT, texts_of

pytest.importorskip("ziglang", reason="the strict front end needs clang")


@pytest.mark.parametrize("case", RECURRENT)
def test_accepted_by_the_strict_front_end(case):
    from metal.host.strict import check

    (text,) = texts_of(RECURRENT[case])
    assert text.kernel == f"metal_lite_{case.split()[0]}"
    assert check(text.text) == []
