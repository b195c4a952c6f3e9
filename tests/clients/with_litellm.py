# /// script
# dependencies = ["litellm==1.106.0"]
# ///
"""LiteLLM, as an OpenAI server and as vLLM."""

from asked import HELLO, LISBON, URL, City, check, check_vectors
from litellm import completion, embedding, rerank

for name in "openai/demo", "hosted_vllm/demo":
    own = {"model": name, "api_base": URL, "api_key": "-"}
    hi = [{"role": "user", "content": "hi"}]
    check(completion(messages=hi, **own).choices[0].message.content, HELLO)
    chunks = completion(messages=hi, stream=True, stream_options={"include_usage": True}, **own)
    chunks = list(chunks)
    check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), HELLO)
    assert chunks[-1].usage.completion_tokens
    found = completion(messages=hi, response_format=City, **own).choices[0].message.content
    check(City.model_validate_json(found), LISBON)
    vectors = embedding(input=["A dog", "Once"], **own).data
    check_vectors(
        [v["embedding"] for v in vectors], embedding(input=["Once"], **own).data[0]["embedding"]
    )
found = rerank(model="hosted_vllm/demo", api_base=URL, query="dog", documents=["A dog", "Once"])
check({r["index"] for r in found.results}, {0, 1})
