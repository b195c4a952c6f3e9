"""Trains the tiny model of the tests that reads a digit and its colour from a picture.

    python -m tools.demo_model.train_reader --out reader                 # a GPU, minutes
    python -m tools.demo_model.train_reader --steps 5 --batch 4 --out /tmp/reader

It has the form of Mistral 3 (a Pixtral tower, a Llama) and sees squares of 64 x 64 pixels; others
are resized.  Its tokens are bytes.  The pictures are drawn here, with Pillow's font.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import mistral3
from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.lib.frame import at_least, parser_of, run_main
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.images.families import completed, find_family
from vllm_metal_lite.images.pictures import picture_of
from vllm_metal_lite.images.pixtral_tower import PixtralTower
from vllm_metal_lite.images.prompts import expand

SPECIAL = ("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}</s>"
    "{% elif message.content is string %}[INST]{{ message.content }}[/INST]"
    "{% else %}[INST]{% for part in message.content %}"
    "{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}[/INST]{% endif %}{% endfor %}"
)
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 20),
    "black": (15, 15, 15),
}
BACKGROUNDS = ((250, 250, 250), (225, 225, 225), (240, 225, 235), (205, 220, 235))
OF_DIGIT = ("Which digit is this?", "What digit do you see?", "Read the digit.")
OF_COLOUR = ("Which colour is it?", "What colour is the digit?", "Name the colour.")
SIZE = 64


def tokenizer() -> Tokenizer:
    """Bytes, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return made


def config(tokens: Tokenizer) -> dict[str, Any]:
    end = tokens.token_to_id("</s>")
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": tokens.token_to_id("[IMG]"),
        "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "eos_token_id": end,
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": tokens.get_vocab_size(),
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 24,
            "hidden_act": "silu",
            "image_size": SIZE,
            "patch_size": 8,
            "rope_theta": 100.0,
        },
    }


def write_files(folder: Path, tokens: Tokenizer) -> dict[str, Any]:
    """All files of the model but its weights; returns the configuration."""
    made = config(tokens)
    end = made["eos_token_id"]
    files = {
        "config.json": made,
        "generation_config.json": {"do_sample": False, "eos_token_id": end},
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 16, "width": 16},
            "size": {"longest_edge": SIZE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1024,
            "chat_template": TEMPLATE,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    tokens.save(str(folder / "tokenizer.json"))
    return made


def draw(digit: int, colour: str, rng: random.Random) -> np.ndarray:
    """A picture (64, 64, 3) of a digit, of random size, place and background."""
    image = Image.new("RGB", (SIZE, SIZE), rng.choice(BACKGROUNDS))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=rng.randint(36, 58))
    left, top, right, bottom = pen.textbbox((0, 0), str(digit), font=font)
    x, y = (rng.randint(0, int(SIZE - size)) for size in (right - left, bottom - top))
    shade = tuple(min(255, max(0, c + rng.randint(-15, 15))) for c in COLOURS[colour])
    pen.text((x - left, y - top), str(digit), font=font, fill=shade)
    return np.asarray(image)


def conversation(rng: random.Random) -> tuple[list[np.ndarray], list[tuple[str, str]]]:
    """(pictures, turns): one or two pictures with one or two questions each, or none."""
    pictures, turns = [], []
    if rng.random() < 0.08:
        return [], [(rng.choice(OF_DIGIT + OF_COLOUR), "I see no picture.")]
    for _ in range(rng.choice((1, 1, 2))):
        digit, colour = rng.randrange(10), rng.choice(list(COLOURS))
        pictures.append(draw(digit, colour, rng))
        place = "[IMG]"
        for _ in range(rng.choice((1, 2))):
            is_digit = rng.random() < 0.6
            question = rng.choice(OF_DIGIT if is_digit else OF_COLOUR)
            answer = f"It is a {digit}." if is_digit else f"It is {colour}."
            turns.append((place + question, answer))
            place = ""
    return pictures, turns


class Data:
    """Batches: token ids, which of them are answers, the row of each picture token, pictures."""

    def __init__(self, tokens: Tokenizer, processor: Processor, seed: int) -> None:
        self.tokens, self.processor, self.rng = tokens, processor, random.Random(seed)
        self.rows = (SIZE // 16) ** 2

    def batch(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        samples, pictures, num_pictures = [], [], 0
        image = self.processor.family.image_token_id
        for _ in range(count):
            drawn, turns = conversation(self.rng)
            prepared = [self.processor(picture_of(rgb)) for rgb in drawn]
            ids, answers = [self.tokens.token_to_id("<s>")], [False]
            for question, answer in turns:
                part = f"[INST]{question}[/INST]"
                if "[IMG]" in question:
                    part = expand(part, self.processor.family, prepared[:1])
                    pictures.append(prepared.pop(0).patches)
                for text, is_answer in ((part, False), (answer + "</s>", True)):
                    more = self.tokens.encode(text).ids
                    ids += more
                    answers += [is_answer] * len(more)
            rows, next_row = [], num_pictures * self.rows
            for token in ids:
                rows.append(next_row if token == image else -1)
                next_row += token == image
            num_pictures = len(pictures)
            samples.append((ids, answers, rows))
        length = -(-max(len(ids) for ids, _, _ in samples) // 32) * 32
        padded = [
            np.full((count, length), fill, kind)
            for fill, kind in ((0, np.int32), (False, bool), (-1, np.int32))
        ]
        padded[0][:] = self.tokens.token_to_id("<pad>")
        for i, sample in enumerate(samples):
            for out, values in zip(padded, sample, strict=True):
                out[i, : len(values)] = values
        most = -(-max(len(pictures), 1) // 16) * 16
        patches = np.zeros((most, 64, 192), np.uint8)
        patches[: len(pictures)] = pictures or 0
        ids, answers, rows = padded
        return ids, answers, rows, patches


class Reader(nn.Module):
    def __init__(self, made: dict[str, Any]) -> None:
        super().__init__()
        self.text = mistral3.Model(mistral3.ModelArgs.from_dict(made))
        self.tower = PixtralTower(completed(made))

    def __call__(self, ids: mx.array, rows: mx.array, patches: mx.array) -> mx.array:
        def features(picture: mx.array) -> mx.array:
            return self.tower(picture, (8, 8)).rows

        pixels = patches.astype(mx.float32) / 127.5 - 1
        found = mx.vmap(features)(pixels).reshape(-1, 96)
        h = self.text.language_model.model.embed_tokens(ids)
        h = mx.where(rows[..., None] >= 0, found[mx.maximum(rows, 0)], h)
        return self.text(ids, input_embeddings=h)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=at_least(1), default=4000)
    parser.add_argument("--batch", type=at_least(1), default=128)
    parser.add_argument("--minutes", type=float, default=8.0, help="the longest training")
    parser.add_argument("--seed", type=int, default=0)
    args: argparse.Namespace = parser.parse_args()
    mx.random.seed(args.seed)
    tokens = tokenizer()
    made = write_files(args.out, tokens)
    family = find_family(made)
    assert family is not None
    data = Data(tokens, Processor(family, args.out), args.seed)
    model = Reader(made)
    warm_up = min(200, args.steps // 4)
    rate = optim.join_schedules(
        [optim.linear_schedule(0, 1e-3, warm_up), optim.cosine_decay(1e-3, args.steps - warm_up)],
        [warm_up],
    )
    optimizer = optim.AdamW(rate, weight_decay=0.02)

    def loss_of(model: Reader, ids: Any, answers: Any, rows: Any, patches: Any) -> mx.array:
        logits = model(ids[:, :-1], rows[:, :-1], patches)
        losses = nn.losses.cross_entropy(logits, ids[:, 1:])
        return (losses * answers[:, 1:]).sum() / answers[:, 1:].sum()

    grad_of, start = nn.value_and_grad(model, loss_of), time.monotonic()
    for step in range(args.steps):
        loss, grads = grad_of(model, *map(mx.array, data.batch(args.batch)))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        seconds = time.monotonic() - start
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {seconds:.0f} s", flush=True)
        if seconds > 60 * args.minutes:
            print(f"stopped at step {step} after {args.minutes} minutes")
            break
    right = count = 0
    for _ in range(8):
        ids, answers, rows, patches = data.batch(64)
        drawn = model(*map(mx.array, (ids[:, :-1], rows[:, :-1], patches))).argmax(-1)
        same = (np.array(drawn) == ids[:, 1:]) | ~answers[:, 1:]
        right, count = right + int(same.all(axis=1).sum()), count + 64
    print(f"conversations with right answers only: {right} of {count}")
    save(model, args.out)


def save(model: Reader, folder: Path) -> None:
    """The weights in float16, by names of a checkpoint."""
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        part, _, rest = name.partition(".")
        if name == "tower.embed.weight":
            rest, value = "patch_conv.weight", value.reshape(-1, 3, 8, 8)
        prefix = "" if part == "text" else "vision_tower."
        weights[prefix + rest] = value.astype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


if __name__ == "__main__":
    run_main(main)
