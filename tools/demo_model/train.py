"""Trains the demo model that ships in vllm_metal_lite/demo_model.

    python -m tools.demo_model.train --out demo_model                  # a GPU, 9 minutes
    python -m tools.demo_model.train --smoke --out /tmp/demo_model     # a CPU, some seconds

Data, tokenizer and model are made from nothing but the word lists in tables.json and English
sentences from the docstrings of Python's standard library.  Then measure it: `recall.py`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from tools.demo_model import data
from tools.lib.frame import above_zero, at_least, parser_of, run_main

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "max_position_embeddings": data.MAX_POSITIONS,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": data.END,
    "pad_token_id": data.PAD,
}


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up, a plateau, and a linear decay over the last 60 % of the training."""
    return peak * min(1.0, (step + 1) / 200) * min(1.0, max(0.01, (1 - progress) / 0.6))


class Trainer:
    """The model, its optimizer and the compiled training step."""

    def __init__(self, config: dict, args: argparse.Namespace) -> None:
        mx.random.seed(args.seed)
        self.model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
        if args.resume:
            self.model.load_weights(str(args.resume / "model.safetensors"))
            params = self.model.parameters()
        else:
            params = tree_unflatten(
                [
                    (name, _initial(name, value, config["num_hidden_layers"]))
                    for name, value in tree_flatten(self.model.parameters())
                ]
            )
        self.params = tree_map(lambda p: p.astype(mx.float32), params)
        mx.eval(self.params)
        self.dtype = args.dtype
        self.optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.01)
        self.optimizer.init(self.params)
        state = [self.optimizer.state]
        self._step = mx.compile(self._train, inputs=state, outputs=state)

    def _logits(self, params: dict, ids):
        # The model is only a function here: its arrays are replaced at every call.
        self.model.update(tree_map(lambda p: p.astype(self.dtype), params))
        return self.model(ids).astype(mx.float32)

    def _loss(self, params: dict, ids, said):
        logits, targets = self._logits(params, ids[:, :-1]), ids[:, 1:]
        picked = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
        losses = mx.logsumexp(logits, axis=-1) - picked
        weights = mx.where(said > 0, 1.0, mx.where(targets == data.PAD, 0.0, 0.03))
        return (losses * weights).sum() / weights.sum(), (losses * said).sum() / said.sum()

    def _train(self, params: dict, ids, said, rate):
        self.optimizer.learning_rate = rate
        (_, own), grads = mx.value_and_grad(self._loss)(params, ids, said)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        return self.optimizer.apply_gradients(grads, params), own, norm

    def step(self, ids: np.ndarray, said: np.ndarray, rate: float):
        """Run one optimizer step; returns the loss on the model's own tokens, not yet evaluated."""
        arrays = (mx.array(ids.astype(np.int32)), mx.array(said.astype(np.float32)))
        self.params, loss, norm = self._step(self.params, *arrays, mx.array(rate))
        mx.async_eval(self.params, self.optimizer.state, loss, norm)
        return loss, norm

    def save(self, folder: Path, config: dict) -> None:
        """Write the weights (float32) and the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.params))
        temporary = folder / "new.safetensors"
        mx.save_safetensors(str(temporary), weights, metadata={"format": "mlx"})
        temporary.replace(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _initial(name: str, value, layers: int):
    if value.ndim == 1:
        return value
    scale = 0.02 if "embed" in name else value.shape[-1] ** -0.5
    if "o_proj" in name or "down_proj" in name:
        scale /= math.sqrt(2 * layers)
    return mx.random.normal(value.shape) * scale


def main() -> int:
    """Make the tokenizer, train, save."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=at_least(1), default=12500)
    parser.add_argument("--start", type=at_least(0), default=0, help="first step, with --resume")
    parser.add_argument("--resume", type=Path, help="model folder to start from")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument(
        "--workers", type=at_least(1, 256), default=14, help="processes that make data"
    )
    parser.add_argument("--minutes", type=above_zero, default=1e9, help="stop and save after these")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, on a CPU")
    args = parser.parse_args()
    args.dtype, args.steps, args.workers = (
        (mx.float32, 3, 1) if args.smoke else (mx.bfloat16, args.steps, args.workers)
    )
    sizes = (1024, 128) if args.smoke else (65536, 4096)  # tokens of a batch, of the longest row
    report_every, save_every = (1, 3) if args.smoke else (100, 2500)
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
    else:
        tokenizer = data.train_tokenizer(2048, chats=200 if args.smoke else 4000)
    data.save_tokenizer(tokenizer, args.out)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    outline = data.Outline(tokenizer.to_str(), args.seed, args.steps, *sizes)
    print(f"tokenizer ready after {time.time() - began:.0f} s", flush=True)

    trainer, pending = Trainer(config, args), None
    for step, (ids, said) in enumerate(data.batches(outline, args.start, args.workers), args.start):
        minutes = (time.time() - began) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        result = trainer.step(ids, said, learning_rate(step - args.start, progress, 2e-3))
        if pending is not None:
            pending[0].item()  # keeps the host at most one step ahead
        pending = result
        last = step + 1 == args.steps or minutes > args.minutes
        if (step + 1) % report_every == 0 or last:
            loss, norm = (value.item() for value in result)
            seconds = time.time() - began
            state = f"loss {loss:.4f} norm {norm:.2f}, {seconds:.0f} s"
            print(f"step {step + 1} length {said.shape[1]} {state}", flush=True)
        if (step + 1) % save_every == 0 or last:
            trainer.save(args.out, config)
        if last:
            break
    return 0


if __name__ == "__main__":
    run_main(main)
