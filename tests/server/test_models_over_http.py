"""Several models over HTTP, in engines of their own."""

import shutil

import httpx
import pytest

from tests.support.server.cli_kit import model_folder
from tests.support.server.kit import serving, user
from vllm_metal_lite.backend import mx
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.settings import ServerConfig


@pytest.mark.long
def test_two_models():
    """Each loads when it is named; /status shows them.  The user chooses the format of one."""
    other = ModelSpec("other", "demo", chat_format=FORMATS["kimi_k2"])
    specs = [ModelSpec("demo", "demo"), other, ModelSpec("none", "/no/such-embedding")]
    with serving(specs) as running, httpx.Client(base_url=running.url, timeout=120) as client:

        def ask(model: str) -> httpx.Response:
            body = {"prompt": "hi", "max_tokens": 4, "model": model}
            return client.post("/v1/completions", json=body)

        def states_and_contexts() -> list[tuple[str, int | None]]:
            known = client.get("/v1/models").json()["data"]
            status = client.get("/status").json()["models"]
            for field in "state", "error":
                assert [model[field] for model in known] == [model[field] for model in status]
            return [(model["state"], model["context_length"]) for model in known]

        capabilities = [m["capabilities"] for m in client.get("/v1/models").json()["data"]]
        assert capabilities == [["completion"], ["completion"], ["embedding"]]
        # 4,608 by its files; 4,096 fit.
        before = [("loaded", 4096), ("unloaded", 4608), ("unloaded", None)]
        assert states_and_contexts() == before
        assert ask("other").status_code == 200
        failed = ask("none")
        assert failed.status_code == 503
        assert "no such folder" in failed.text
        assert ask("demo").status_code == 200
        assert states_and_contexts() == [("loaded", 4096), ("loaded", 4096), ("failed", None)]
        status = client.get("/status").json()
        demo, kimi, _ = status["models"]
        assert (demo["chat_format"], demo["tool_calls"]) == ("plain", False)
        assert (kimi["chat_format"], kimi["tool_calls"]) == ("kimi_k2", True)
        assert status["server"] == {"running": 0, "waiting": 0, "max_waiting": 256}
        assert "no such folder" in status["models"][2]["error"]
        for model in demo, kimi:
            assert model["metrics"]["requests_running"] == 0
            assert model["max_model_len"] == 4096


@pytest.mark.long
def test_a_broken_model_leaves_the_loaded_one_in_its_room(tmp_path, caplog):
    """There is room for one of the two."""
    caplog.set_level("INFO", "vllm_metal_lite")
    cut = shutil.copytree(DEMO_PATH, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    specs = [ModelSpec("demo", "demo"), ModelSpec("cut", str(cut))]
    config = ServerConfig(port=0, memory_budget_gib=1.5)
    with serving(specs, config=config) as running, httpx.Client(base_url=running.url) as client:

        def pid() -> int:
            return client.get("/status").json()["models"][0]["pid"]

        before = pid()
        body = {"model": "cut", "prompt": "x", "max_tokens": 1}
        failed = client.post("/v1/completions", json=body, timeout=120)
        assert failed.status_code == 503
        assert "Perhaps an incomplete download or corrupt file" in failed.text
        assert pid() == before
    assert "the model demo is loaded, in " in caplog.text
    assert "is unloaded" not in caplog.text


def test_weights_that_are_not_finite_are_the_servers_fault_and_shown(tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "nan")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with serving([ModelSpec("nan", str(folder))]) as running:
        for path, body in [
            ("chat/completions", {"messages": [user("hi")], "max_tokens": 3}),
            ("embeddings", {"input": "hi"}),
        ]:
            reply = httpx.post(f"{running.url}/v1/{path}", json=body, timeout=600)
            assert reply.status_code == 500
            assert "weights are damaged" in reply.json()["error"]["message"]
        model = httpx.get(f"{running.url}/status", timeout=600).json()["models"][0]
        assert (model["state"], "not finite" in model["error"]) == ("loaded", True)
