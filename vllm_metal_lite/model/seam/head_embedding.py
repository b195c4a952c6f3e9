"""What a trained head shares with its model: the hidden states, the embedding and the LM head.

A head drafts the token after the next one (multi-token prediction, DeepSeek-V3, section 2.2).  For
each row of the model's step, the head reads the next token and the model's hidden state of the row.
For further drafts, it reads its own drafts and its own hidden states.
"""

import mlx.nn as nn

from vllm_metal_lite.backend import mx


class HeadEmbedding(nn.Module):
    """tokens (N, 1) -> fc([norm(embedding), norm(hidden state)]), (N, 1, hidden_size).

    embedding: the model's own.  hidden_first: fc reads the hidden state before the embedding.
    final_norm: the model's final norm, if the head was trained on hidden states from before it;
    else None.
    """

    def __init__(
        self,
        embedding: nn.Module,
        size: int,
        eps: float,
        hidden_first: bool,
        final_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.norm_embedding, self.norm_hidden = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        # Functions, because a module would make the model's weights a part of the head.
        self.embed, self.as_linear = embedding.__call__, getattr(embedding, "as_linear", None)
        # RMSNorm ignores the scale of a row, so dividing by its weights is enough to undo it.
        self.undo = None if final_norm is None else lambda h: h / final_norm.weight
        self.hidden_first = hidden_first
        self._given: mx.array | None = None

    def give(self, hidden: mx.array | None) -> None:
        """Set the hidden states (N, 1, hidden_size) of the next forward, after the model's final
        norm; None: zeros."""
        self._given = hidden

    def __call__(self, tokens: mx.array) -> mx.array:
        embedding = self.embed(tokens)
        hidden = mx.zeros_like(embedding) if self._given is None else self._given
        if self.undo is not None:
            hidden = self.undo(hidden)
        parts = [self.norm_embedding(embedding), self.norm_hidden(hidden)]
        return self.fc(mx.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1))


class ModelsLayer(nn.Module):
    """A layer of the model that a trained head uses, too, such as the LM head.

    The model's weights are no part of the head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.call = layer.__call__

    def __call__(self, x: mx.array) -> mx.array:
        return self.call(x)
