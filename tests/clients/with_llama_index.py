# /// script
# dependencies = [
#   "llama-index-llms-openai-like==0.8.1",
#   "llama-index-embeddings-openai-like==0.4.0",
# ]
# ///
"""LlamaIndex's model, agent and embeddings."""

import asyncio

from asked import HELLO, LISBON, NEWS, URL, WEATHER, City, check, check_vectors, get_weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

own = {"api_base": URL, "api_key": "-"}
model = OpenAILike(
    model="demo", is_chat_model=True, is_function_calling_model=True, context_window=4096, **own
)
check(model.chat([ChatMessage("hi")]).message.content, HELLO)
check(list(model.stream_chat([ChatMessage("hi")]))[-1].message.content, HELLO)
check(model.structured_predict(City, PromptTemplate("Lisbon?")), LISBON)


async def run():
    return await FunctionAgent(tools=[get_weather], llm=model).run(WEATHER)


check(str(asyncio.run(run())), NEWS)
completing = OpenAILike(model="demo", **own)
check(completing.complete("hi").text, HELLO)
vectors = OpenAILikeEmbedding(model_name="demo", **own)
check_vectors(
    vectors.get_text_embedding_batch(["A dog", "Once"]), vectors.get_query_embedding("Once")
)
