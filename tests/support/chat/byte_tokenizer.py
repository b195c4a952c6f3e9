"""A tokenizer that has a token for each byte, and one for each marker."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def tokenizer_of(markers: set[str], special: bool) -> PreTrainedTokenizerFast:
    """special: if not, llguidance takes those in angle brackets for special tokens nevertheless, as
    Qwen's `<tool_call>`.
    """
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(m, special=special, normalized=False) for m in ["<eos>", *sorted(markers)]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
