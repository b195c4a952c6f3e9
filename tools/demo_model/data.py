"""Tokenizer, recall prompts and training batches of the demo model (no MLX in this module)."""

import json
import multiprocessing
import os
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import chat
from tools.demo_model import words as w
from tools.demo_model.facts import question

PAD, END, SYSTEM, USER, ASSISTANT = range(5)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
ROLE_IDS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
MAX_POSITIONS = 4608
HELD_OUT_SEED = 10**9  # training draws its seeds below this

# Every message is rendered alone, so a longer conversation always extends a shorter one.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' or message.role == 'developer' -%}{{- '<|system|>' -}}"
    "{%- elif message.role == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- else -%}{{- '<|user|>' -}}{%- endif -%}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content or [] -%}{{- part.text or '' -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(vocab_size: int, chats: int = 4000) -> Tokenizer:
    """A byte-level BPE tokenizer trained on generated conversations; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(chats), trainer)
    return tokenizer


def _tokenizer_texts(chats: int) -> Iterator[str]:
    rng = random.Random(7)
    names = ("NAMES", "THINGS", "ADJECTIVES", "FOODS", "ANIMALS", "CITIES", "PLACES")
    known = [word for name in names for word in w.WORDS[name]]
    for _ in range(chats // 100):
        for word in known:
            yield f"{word} {word} {word.lower()} {word.capitalize()}"
    for _ in range(chats):
        for _, text in chat.draw_chat(rng, 1000):
            yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": END, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def encode_chat(tokenizer: Tokenizer, messages: list[chat.Message]) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template gives them, and which of them the model must generate."""
    ids: list[int] = []
    said: list[bool] = []
    encodings = tokenizer.encode_batch([text for _, text in messages])
    for (role, _), encoding in zip(messages, encodings, strict=True):
        ids += [ROLE_IDS[role], *encoding.ids, END]
        own = role == "assistant"
        said += [False, *[own] * (len(encoding.ids) + 1)]
    return ids, said


# --- recall prompts -------------------------------------------------------------------------


@dataclass
class RecallPrompt:
    """A conversation that ends in a question whose answer was stated somewhere in it."""

    messages: list[chat.Message]
    prompt_ids: list[int]
    value: str


def recall_prompt(tokenizer: Tokenizer, rng: random.Random, length: int) -> RecallPrompt:
    """A prompt of at most (and nearly) `length` tokens with hard-to-guess values."""
    shape = rng.choice(("system", "user", "merged", "turns"))
    size = int(length * 3.3)
    while True:
        trial = random.Random(rng.random())
        talk = chat.Chat(trial, 0)
        talk.strong = True
        if shape == "turns":
            for _ in range(pieces := max(2, length // 100)):
                talk.turn(talk.block(size // pieces), chat.NOTED)
        elif shape == "user":
            talk.turn(talk.block(size), chat.NOTED)
        else:
            talk.say("system" if shape == "system" else "user", talk.block(size))
        if len(talk.facts) < 3:  # almost nothing but filler
            continue
        fact = trial.choice(list(talk.facts.values()))
        asked = question(fact, trial)
        if shape == "merged":
            talk.messages[0] = ("user", f"{talk.messages[0][1]}\n\n{asked}")
        else:
            talk.say("user", asked)
        ids = encode_chat(tokenizer, talk.messages)[0] + [ASSISTANT]
        if 0.9 * length < len(ids) <= length:
            break
        size = int(size * (0.97 * length / len(ids)))
    return RecallPrompt(talk.messages, ids, fact.value)


def recall_prompts(tokenizer: Tokenizer, length: int, count: int) -> list[RecallPrompt]:
    """Held-out prompts: always the same ones for a length."""
    return [
        recall_prompt(tokenizer, random.Random(HELD_OUT_SEED + 10_000 * length + i), length)
        for i in range(count)
    ]


# --- training batches -----------------------------------------------------------------------


def row_length(progress: float, rng: random.Random) -> int:
    """The curriculum: the length of a batch's rows at `progress` (0 to 1) through the training."""
    if progress < 0.12:
        return 256
    if progress < 0.25:
        return rng.choices((256, 512), (0.4, 0.6))[0]
    if progress < 0.45:
        return rng.choices((256, 512, 1024), (0.25, 0.15, 0.6))[0]
    return rng.choices((256, 1024, 2048, 4096), (0.3, 0.15, 0.2, 0.35))[0]


def make_batch(
    tokenizer: Tokenizer, seed: int, length: int, batch_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (rows, length + 1) and which targets count (rows, length)."""
    rng = random.Random(seed)
    rows = max(1, batch_tokens // length)
    ids = np.full((rows, length + 1), PAD, dtype=np.uint16)
    said = np.zeros((rows, length + 1), dtype=np.uint8)
    for row in range(rows):
        row_ids, row_said = encode_chat(tokenizer, chat.draw_chat(rng, int(length * 3.2)))
        count = min(len(row_ids), length + 1)
        ids[row, :count], said[row, :count] = row_ids[:count], row_said[:count]
    return ids, said[:, 1:]


@dataclass(frozen=True)
class Outline:
    """The values that the batches of a training depend on."""

    tokenizer: str  # as JSON
    seed: int
    steps: int
    batch_tokens: int
    max_length: int

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        seed = self.seed * 10_000_000 + step
        length = min(row_length(step / self.steps, random.Random(seed)), self.max_length)
        return make_batch(Tokenizer.from_str(self.tokenizer), seed, length, self.batch_tokens)


def batches(outline: Outline, start: int, workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches from step `start` on, made ahead by worker processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        coming: deque[Future] = deque()
        for step in range(start, outline.steps):
            coming.append(pool.submit(outline.batch, step))
            if len(coming) > 4 * workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
