"""Tokenizers that are Python code in the model's folder: run only where the user says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from tests.support.models import tiny_models
from tests.support.server.cli_kit import COMMAND
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.errors import ConfigError, RemoteCodeError

_CODE = '''\
from pathlib import Path

from transformers import PreTrainedTokenizer

(Path(__file__).parent / "ran").touch()


class ByteTokenizer(PreTrainedTokenizer):
    """Tokens are bytes."""

    vocab_size = 256

    def get_vocab(self):
        return {self._convert_id_to_token(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return [chr(0x100 + byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return ord(token) - 0x100

    def _convert_id_to_token(self, index):
        return chr(0x100 + index)

    def convert_tokens_to_string(self, tokens):
        return bytes(ord(t) - 0x100 for t in tokens).decode(errors="replace")
'''


# Without a choice, transformers asks on stdin for one of them and tries its own tokenizer for the
# other.  To mlx-lm both are llamas.
@pytest.fixture(params=["llama", "iquestcoder"])
def folder(tmp_path, monkeypatch, request) -> Path:
    """A model whose tokenizer is code."""
    # Transformers copies the code here and imports it from there.
    modules = tmp_path / "modules"
    monkeypatch.setenv("HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tiny_models.write_folder(tmp_path / "model", "llama", vocab_size=256)
    (path / "tokenizer.json").unlink()
    tiny_models.edit(path / "config.json", model_type=request.param)
    (path / "byte_tokenizer.py").write_text(_CODE)
    config = {
        "tokenizer_class": "ByteTokenizer",
        "auto_map": {"AutoTokenizer": ["byte_tokenizer.ByteTokenizer", None]},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_option_runs_the_code(folder):
    llm = LLM(str(folder), num_blocks=8, trust_remote_code=True)
    output = llm.generate("héllo", SamplingParams(temperature=0, max_tokens=4))[0]
    assert output.prompt_token_ids == list("héllo".encode())
    assert len(output.outputs[0].token_ids) == 4


def test_nothing_runs_without_the_option(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(RemoteCodeError, match="set trust_remote_code to") as error:
        LLM(str(folder), num_blocks=8)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(folder.parent.rglob("ran"))


def test_an_architecture_that_is_code_is_refused_with_the_same_words(folder):
    tiny_models.edit(folder / "config.json", model_file="model.py")
    with pytest.raises(RemoteCodeError, match="set trust_remote_code to"):
        LLM(str(folder), num_blocks=8)


def test_the_option_is_true_or_false():
    with pytest.raises(ConfigError, match="trust_remote_code must be true or false, got 'yes'"):
        LLM("demo", trust_remote_code="yes")


@pytest.mark.long
def test_the_flag(folder):
    def generate(*flags: str) -> subprocess.CompletedProcess:
        argv = [*COMMAND, "generate", "-", "--model", folder, "--num-blocks", "8", *flags]
        line = '{"prompt": "y", "max_tokens": 3, "temperature": 0}\n'
        return subprocess.run(list(map(str, argv)), input=line, capture_output=True, text=True)

    refused = generate()
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.splitlines()[0] == f"Loading {folder} ..."
    (error,) = refused.stderr.splitlines()[1:]
    assert "set --trust-remote-code to" in error
    assert not list(folder.parent.rglob("ran"))

    done = generate("--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3
    assert "transformers" not in done.stderr
