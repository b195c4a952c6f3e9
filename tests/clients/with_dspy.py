# /// script
# dependencies = ["dspy[numpy]==3.4.1"]
# ///
"""DSPy: both adapters, an agent, embeddings."""

import dspy
from asked import LISBON, URL, City, check, check_vectors

lm = dspy.LM("openai/demo", api_base=URL, api_key="-", cache=False, max_tokens=400)
dspy.configure(lm=lm)


class Ask(dspy.Signature):
    question: str = dspy.InputField()
    city: City = dspy.OutputField()


say = 'Lisbon? SAY<[[ ## city ## ]]\n{"city": "Lisbon", "degrees": 21}\n\n[[ ## completed ## ]]>'
check(dspy.Predict(Ask)(question=say).city, LISBON)
with dspy.context(adapter=dspy.JSONAdapter()):
    check(
        dspy.Predict(Ask)(question='Lisbon? SAY<{"city": {"city": "Lisbon", "degrees": 21}}>').city,
        LISBON,
    )
embed = dspy.Embedder("openai/demo", api_base=URL, api_key="-", caching=False)
check_vectors(embed(["A dog", "Once"]), embed("Once"))
