"""Every answer has its own id, and errors have the shape of their API."""

from unittest.mock import Mock

import pytest

from tests.support.server.raw_http import BODY, CHAT, MESSAGES, ask
from vllm_metal_lite.server import security


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/completions", 405),
        ("PATCH", "/tokenize", 405),
        ("GET", MESSAGES, 405),
        ("POST", "/v1/messages/nothing", 404),
        ("POST", CHAT, 400),
        ("POST", MESSAGES, 400),
    ],
)
def test_errors_have_the_shape_of_their_api(running, method, path, status):
    answer = ask(running.url, path, method=method)
    assert answer.status == status
    assert answer.headers["x-request-id"].startswith("req_")
    whole = answer.json()
    if path.startswith(MESSAGES):
        assert whole["type"] == "error"
        assert set(whole["error"]) == {"type", "message"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    else:
        assert set(whole) == {"error"}
        assert set(whole["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


def test_an_unknown_failure_has_the_shape_of_its_api(running, monkeypatch, caplog):
    broken = Mock(side_effect=ZeroDivisionError("the secret reason"))
    monkeypatch.setattr(security._Checked, "_check", broken)
    for path in CHAT, MESSAGES:
        answer = ask(running.url, path, method="POST", body=BODY)
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "internal error: see the server's log"
        assert answer.headers["x-request-id"]
    assert len([r for r in caplog.records if r.exc_info]) == 2
    monkeypatch.undo()
    assert ask(running.url, "/health").status == 200


def test_every_answer_has_an_id_of_its_own(running):
    ids = set()
    for method, path, body in (
        ("HEAD", "/", b""),
        ("GET", "/health", b""),
        ("POST", CHAT, BODY),
        ("POST", CHAT, BODY[:-1] + b', "stream": true}'),
        ("POST", MESSAGES, BODY),
    ):
        answer = ask(running.url, path, method=method, body=body)
        assert answer.status == 200
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 5
