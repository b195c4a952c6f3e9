"""Finds the part of a growing answer that a reader has not seen."""

from vllm_metal_lite.outputs import CompletionOutput, Logprob


class Cursor:
    """The part of an answer that a reader has seen."""

    def __init__(self, answer: CompletionOutput) -> None:
        self.answer = answer
        self._num_tokens = self._num_characters = 0

    def tokens(self) -> tuple[list[int], list[dict[int, Logprob]] | None]:
        """Token ids since the last call, and their log-probabilities if there are any."""
        new = slice(self._num_tokens, len(self.answer.token_ids))
        self._num_tokens = new.stop
        logprobs = self.answer.logprobs
        return self.answer.token_ids[new], None if logprobs is None else logprobs[new]

    def text(self) -> str:
        """Text since the last call."""
        text, start = self.answer.text, self._num_characters
        self._num_characters = len(text)
        return text[start:]
