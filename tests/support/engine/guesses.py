"""A speculator whose drafts need no repetition."""

from random import Random

from vllm_metal_lite.speculation.speculator import Speculator


class Guesses(Speculator):
    """Drafts that are the true answers with errors, of random lengths, in random steps."""

    def __init__(self, engine, truth, seed=0, right=0.8, longest=6):
        super().__init__(engine.in_flight.seats.tokens_of)
        self.truth, self.random = truth, Random(seed)
        self.right, self.longest = right, longest

    def wants(self, decodes):
        return self.random.random() < 0.7

    def propose(self, wanted):
        return [self._guess(request, most) for request, most in wanted]

    def _guess(self, request, most):
        known = self._tokens_of(request).tolist()
        answer = self.truth.get(request.request_id, [])[len(known) - request.num_prompt_tokens :]
        length = min(most, self.random.randint(0, self.longest))
        choose = self.random.random
        return [t if choose() < self.right else self.random.randrange(90) for t in answer[:length]]
