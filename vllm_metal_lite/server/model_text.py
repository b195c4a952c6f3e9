"""The text side of a model: requests become token ids, and answers become text."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.detect import PLAIN, detect
from vllm_metal_lite.engine.chat_prompt import THINKING, by_template, template_source
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.model.files.pooling_config import PoolingConfig
from vllm_metal_lite.server.piece_encoder import PieceEncoder
from vllm_metal_lite.server.templates import Template, probe
from vllm_metal_lite.structured_outputs.marks import marks_of

_LEAST_COUNTED = 16_384  # tokens of a prompt that are counted in any case


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about an engine and its model, for the server.

    uses_checkpoints: whether checkpoints help, because requests can start at some positions only.
    num_blocks: the number of blocks of the first KV group.  description: lines for the user.
    no_pictures: why the model takes no pictures; None: it takes them.  max_pictures: the most of a
    prompt.
    """

    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]
    uses_checkpoints: bool
    block_size: int
    num_blocks: int
    max_num_seqs: int
    attention: str
    attention_reason: str
    weight_bytes: int
    store_bytes: int
    description: tuple[str, ...]
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    no_pictures: str | None = ""
    max_pictures: int = 0


class ModelText:
    """A model's tokenizer and its properties.  Each property is computed at its first use.

    processor: prepares the pictures of a model that takes them.
    """

    def __init__(
        self, facts: ModelFacts, tokenizer: TokenizerWrapper, processor: Processor | None = None
    ) -> None:
        self.facts, self.tokenizer, self.processor = facts, tokenizer, processor
        self._source = template_source(tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """The length in characters of the longest token's text.  Slow the first time."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def max_prompt_tokens(self) -> int:
        """Counting the tokens of a prompt stops here."""
        return max(2 * self.facts.max_model_len, _LEAST_COUNTED)

    @property
    def max_characters(self) -> int:
        """No prompt with more characters fits, whatever its text is."""
        return self.max_prompt_tokens * self.longest_token

    @cached_property
    def encode_text(self) -> PieceEncoder:
        """Makes token ids of texts that repeat those before, as turns of a conversation do."""
        return PieceEncoder(self.tokenizer)

    @cached_property
    def template(self) -> Template:
        """The features of the chat template.  A probe finds them, in milliseconds."""
        return probe(self.tokenizer)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model writes thoughts and calls.  Found by a probe, in milliseconds."""
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            return PLAIN

        def render(messages: Any, tools: Any, generation: bool) -> str:
            return by_template(tokenizer, messages, generation, {"tools": tools})

        return detect(self._source, render, self.grammar_tokens)

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template knows of thoughts."""
        thoughts = self.chat_format.thoughts
        return thoughts is not None and thoughts.end in self._source

    @property
    def can_think(self) -> bool:
        """Whether the chat template marks thoughts, or has a variable for them."""
        return self.thinks or bool(self.template.variables & THINKING)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokenizer's special tokens, by their text."""
        tokenizer = self.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        return {token.content: i for i, token in added.items() if token.special} | dict(named)

    @cached_property
    def grammar_tokens(self) -> dict[str, int]:
        """Ids of the tokens that a grammar must name by id."""
        return marks_of(self.tokenizer) | self.special_tokens
