"""LangChain's and LlamaIndex's embedding classes get the embeddings of the Python API.

The test installs them with pip into a folder of their own, which git ignores.
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.run_python import run_python
from tests.support.server.kit import serving
from vllm_metal_lite import LLM

FOLDER = Path(__file__).parents[2] / "models" / "embedding_clients"
PACKAGES = ("langchain-openai==1.7.4", "llama-index-embeddings-openai-like==0.4.0")
TEXTS = ["Once upon a time", "A dog", "The sun was warm, and Lily went to the park"]
PROGRAMS = {
    "langchain": """
from langchain_openai import OpenAIEmbeddings
client = OpenAIEmbeddings(
    model="demo", base_url=url, api_key="-", check_embedding_ctx_length=False
)
found = [*client.embed_documents(texts), client.embed_query(texts[0])]
""",
    "llama_index": """
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
client = OpenAILikeEmbedding(model_name="demo", api_base=url, api_key="-")
found = [*client.get_text_embedding_batch(texts), client.get_query_embedding(texts[0])]
""",
}


@cache
def install() -> None:
    """Install the packages, once; skip the test where that fails."""
    done = FOLDER / "installed"
    if done.exists() and done.read_text() == " ".join(PACKAGES):
        return
    flags = "-q", "--no-compile", "--target", FOLDER
    run = run_python("-m", "pip", "install", *flags, *PACKAGES)
    if run.returncode:
        pytest.skip(f"the clients cannot be installed: {run.stderr[-300:]}")
    done.write_text(" ".join(PACKAGES))


@pytest.mark.thorough  # installs packages, for most of a minute
@pytest.mark.parametrize("client", PROGRAMS)
def test_clients_get_the_embeddings_of_the_python_api(client):
    install()
    wanted = [o.embedding for o in LLM("demo", num_blocks=256).embed([*TEXTS, TEXTS[0]])]
    with serving() as running:
        given = f"import json\nurl, texts = {running.url + '/v1'!r}, {TEXTS!r}\n"
        program = given + PROGRAMS[client] + "print(json.dumps(found))"
        run = run_python("-c", program, env=os.environ | {"PYTHONPATH": str(FOLDER)})
    assert run.returncode == 0, run.stderr[-2000:]
    np.testing.assert_allclose(json.loads(run.stdout), wanted, atol=1e-5)
