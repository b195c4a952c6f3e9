"""What the tests of the command line share: a model folder, and a person at a terminal.

The model is a toy of random weights whose tokens are bytes, so any text goes in, and what comes out
is noise of all sorts.  Greedy answers never end by themselves.
"""

import atexit
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models import tiny_models
from vllm_metal_lite.backend import mx

CONTEXT, EOS = 1024, 256
# Tokens of an answer that still runs whenever an interrupt comes.
ENDLESS = 1 << 16
CONTROL_C = "\x03"
SAFETY = 600  # seconds after which a run hangs, however busy the machine is
COMMAND = [sys.executable, "-m", "vllm_metal_lite"]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_MARKS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


@cache
def model_folder(template: bool = True, context: int = CONTEXT) -> Path:
    """A model that can chat, or (template False) one without a chat template."""
    path = Path(tempfile.mkdtemp(prefix="vllm-metal-lite-test-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    tiny_models.write_folder(
        path, "qwen3", vocab_size=256 + len(_MARKS), max_position_embeddings=context
    )
    weights = mx.load(str(path / "model.safetensors"))
    weights["model.embed_tokens.weight"][EOS] = 0  # tied: its logit is 0, and others are higher
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_MARKS)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _MARKS[0]}
    if template:
        config["chat_template"] = _TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tiny_models.edit(path / "config.json", eos_token_id=EOS)
    return path


def pipe(text: str | bytes) -> io.TextIOWrapper:
    """What stdin is when a pipe brings this text."""
    return io.TextIOWrapper(io.BytesIO(text.encode() if isinstance(text, str) else text), "utf-8")


class Typist:
    """A person at a terminal of its own, in which the command runs."""

    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", "PYTHONIOENCODING": "utf-8", **(env or {})})
            os.execv(COMMAND[0], [*COMMAND, *map(str, args)])
        self.seen = ""
        self._unread = ""

    def type(self, text: str) -> None:
        """Type a line, and enter."""
        self.press(text + "\r")

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C at a prompt.

        Between the prompt and the wait for a key there is a moment in which Python's `input` takes
        note of a signal only at the next key: so not before the process sleeps.
        """
        deadline, asleep = time.monotonic() + SAFETY, 0
        while asleep < 5:
            assert time.monotonic() < deadline, "the command does not wait for a key"
            time.sleep(0.01)
            command = ["ps", "-o", "state=", "-p", str(self.pid)]
            state = subprocess.run(command, capture_output=True, text=True).stdout
            asleep = asleep + 1 if state.startswith(("S", "I")) else 0
        self.press(CONTROL_C)

    def wait(self, pattern: str) -> str:
        """Read until the pattern is seen; returns all text since the last wait, up to its end."""
        deadline = time.monotonic() + SAFETY
        while not (match := re.search(pattern, self._unread, re.DOTALL)):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"no {pattern!r} in {self._unread!r}")
        text, self._unread = self._unread[: match.end()], self._unread[match.end() :]
        return text

    def leave(self) -> int:
        """Wait for the process to end; returns its exit code."""
        deadline = time.monotonic() + SAFETY
        while self._read(deadline - time.monotonic()):
            pass
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise AssertionError("the command does not end")

    def close(self) -> None:
        """End the process, if it still runs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(timeout, 0))
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that nobody holds the other end any more
            return False
        text = data.decode(errors="replace")
        self.seen += text
        self._unread += text
        return bool(data)
