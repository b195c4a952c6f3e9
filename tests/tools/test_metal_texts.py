"""The tool that writes the Metal texts for Apple's compiler."""

import pytest

from metal.host import mlx_source
from tests.support.run_python import run_python
from vllm_metal_lite.kernels import source

TOOL = "tools.prove.metal_texts"


@pytest.mark.thorough
def test_every_kernel_is_written_with_the_prelude(tmp_path):
    done = run_python("-m", TOOL, tmp_path / "new", check=True)
    texts = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert done.stdout.startswith(f"{len(texts)} texts in ")
    assert {name.rpartition("-")[0] for name in texts} == {
        f"metal_lite_{file.stem}" for file in source.FOLDER.glob("*.metal")
    }
    for text in texts.values():
        assert text.startswith(mlx_source.PRELUDE)
        assert "[[kernel]]" in text
