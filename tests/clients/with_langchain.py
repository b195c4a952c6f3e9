# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""LangChain's chat model and embeddings, and an agent of LangGraph."""

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, check_vectors, get_weather
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

own = {"model": "demo", "base_url": URL, "api_key": "-"}
model = ChatOpenAI(max_tokens=200, stream_usage=True, **own)
check(model.invoke([("system", "Be kind."), ("user", "hi")]).content, HELLO)
chunks = list(model.stream([("user", [{"type": "text", "text": "hi"}])]))
check("".join(chunk.content for chunk in chunks), HELLO)
assert any(chunk.usage_metadata for chunk in chunks)
for method in "json_schema", "function_calling":
    check(model.with_structured_output(City, method=method).invoke("Lisbon?"), LISBON)
for form in None, City:
    agent = create_agent(model, [get_weather], response_format=form)
    ended = agent.invoke({"messages": [("user", WEATHER)]})
    check(ended.get("structured_response", ended["messages"][-1].content), LISBON if form else NEWS)
vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **own)
check_vectors(vectors.embed_documents(["A dog", "Once"]), vectors.embed_query("Once"))
