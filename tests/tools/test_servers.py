"""Servers that a tool starts."""

import sys

import pytest

from tools.lib import servers
from vllm_metal_lite import MetalLiteError


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "DEADLINE", 0.5, raising=False)
    code = "import time; print('loading', flush=True); time.sleep(30)"
    with (
        pytest.raises(MetalLiteError, match="does not start: loading"),
        servers.server([sys.executable, "-c", code], tmp_path / "log"),
    ):
        pass
