"""Servers that a tool starts."""

import sys

import httpx
import pytest

from tools.lib import servers
from vllm_metal_lite import MetalLiteError


@pytest.mark.parametrize(
    ("then", "deadline", "says"),
    [("exec sleep 30", 0.5, "does not answer within 0"), ("exit 3", 60, "ends with exit code 3")],
)
def test_a_server_that_does_not_start(then, deadline, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(servers, "DEADLINE", deadline)
    command = ["sh", "-c", f"echo loading; {then}"]
    with pytest.raises(MetalLiteError, match=says), servers.server(command, tmp_path / "log"):
        pass
    assert capsys.readouterr().err.endswith("loading\n")


def test_an_error_of_http_is_an_error_of_the_project(tmp_path):
    command = [sys.executable, "-m", "http.server", "PORT", "--bind", "127.0.0.1"]
    (tmp_path / "health").touch()
    with (
        pytest.raises(MetalLiteError, match="404"),
        servers.server(command, tmp_path / "log", cwd=tmp_path) as (url, _),
    ):
        httpx.get(f"{url}/gone", trust_env=False).raise_for_status()
