"""The least time of a decode step on several machines: tensor parallel beside data parallel.

    python -m tools.count.ranks                                      M4 Max, two links
    python -m tools.count.ranks --chip "M3 Ultra" --ranks 2 4 8
    python -m tools.count.ranks --chip H200 --link 20 350            a link: microseconds, GB/s

Predictions, not measurements.  A step reads weights, K and V at the chip's memory bandwidth, or
computes at its peak rate if that takes longer, and then waits for its sums.  Launches, the host,
and kernels that are slower than that are left out.  `tools/bench/sums.py` measures a link.  Prints
Markdown.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from tools.dev.run_main import run_main


class Shape(NamedTuple):
    """A model.  intermediate: of one expert, if there are several."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int = 1
    top_k: int = 1


class Chip(NamedTuple):
    """gb_s: memory bandwidth.  tflops: peak of 16-bit products.  gib: for weights, K and V."""

    gb_s: float
    tflops: float
    gib: float


class Link(NamedTuple):
    """us: a small sum of two ranks.  gb_s: in one direction.  mesh: each pair has its own cable, so
    that a small sum takes one exchange; otherwise a sum goes around the ranks."""

    us: float
    gb_s: float
    mesh: bool = False


# From the models' config.json.
MODELS = {
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151_936, tied=True),
    "Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25_600, 151_936, tied=False),
    "Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151_936, tied=False, experts=128, top_k=8),
}
# Bits of a weight; 4-bit groups of 64 have a 16-bit scale and bias each.
WEIGHTS = {"bf16": 16.0, "4-bit": 4.5}
# Makers' bandwidths and memories; a Mac's GPU may use about three quarters of the memory.  Rates of
# Macs: cores x 128 lanes x 2 x clock.
CHIPS = {
    "M4 Pro": Chip(273, 8, 0.75 * 64),
    "M4 Max": Chip(546, 16, 0.75 * 128),
    "M3 Ultra": Chip(819, 28, 0.75 * 512),
    "H200": Chip(4800, 989, 130),
}
# docs/scale.md names the sources.
LINKS = {
    "ring": Link(300, 2.0),  # TCP over Thunderbolt
    "JACCL": Link(30, 6.0, mesh=True),  # RDMA over Thunderbolt 5
}


def attention_weights(s: Shape) -> int:
    return s.layers * s.hidden * s.head_dim * 2 * (s.heads + s.kv_heads)


def mlp_weights(s: Shape, experts: float) -> float:
    """Weights of so many experts in each layer."""
    return s.layers * 3 * s.hidden * s.intermediate * experts


def used_experts(s: Shape, batch: int) -> float:
    """How many experts of a layer a batch uses, if each token chooses by chance."""
    return s.experts * (1 - (1 - s.top_k / s.experts) ** batch)


def kv_bytes(s: Shape, batch: int, context: int) -> int:
    return batch * context * s.layers * 2 * s.kv_heads * s.head_dim * 2


def stored_gib(s: Shape, bits: float, batch: int, context: int, ranks: int) -> float:
    """What one of so many ranks holds."""
    divided = attention_weights(s) + mlp_weights(s, s.experts)
    whole = s.vocab * s.hidden * (1 if s.tied else 2)
    return ((divided / ranks + whole) * bits / 8 + kv_bytes(s, batch, context) / ranks) / 2**30


def sum_seconds(link: Link, ranks: int, nbytes: float) -> float:
    """A ring's all-reduce is a reduce-scatter and an all-gather, each of ranks - 1 exchanges."""
    turns = 1 if link.mesh else ranks - 1
    return turns * link.us * 1e-6 + 2 * (ranks - 1) / ranks * nbytes / (link.gb_s * 1e9)


def step_seconds(
    s: Shape, bits: float, chip: Chip, batch: int, context: int, ranks: int = 1,
    link: Link | None = None,
) -> float:  # fmt: skip
    """A step of `batch` requests.  Each rank has its part of the layers, and the whole head: so
    mlx-lm shards them."""
    head = s.vocab * s.hidden
    read = attention_weights(s) + mlp_weights(s, used_experts(s, batch))
    computed = attention_weights(s) + mlp_weights(s, s.top_k)
    weights = max(
        (read / ranks + head) * bits / 8 / (chip.gb_s * 1e9),
        2 * batch * (computed / ranks + head) / (chip.tflops * 1e12),
    )
    kv = kv_bytes(s, batch, context) / ranks / (chip.gb_s * 1e9)
    if ranks == 1 or link is None:
        return weights + kv
    sums = 2 * s.layers * sum_seconds(link, ranks, 2 * batch * s.hidden)
    return weights + kv + sums + sum_seconds(link, ranks, 4 * batch)  # the last: of sampled tokens


def tensor_rate(
    s: Shape, bits: float, chip: Chip, batch: int, context: int, ranks: int, link: Link | None
) -> float | None:
    """Tokens/s of all requests, with one model on all machines; None if they cannot hold it."""
    if s.kv_heads % ranks or stored_gib(s, bits, batch, context, ranks) > chip.gib:
        return None
    return batch / step_seconds(s, bits, chip, batch, context, ranks, link)


def data_rate(
    s: Shape, bits: float, chip: Chip, batch: int, context: int, servers: int
) -> float | None:
    """Tokens/s of all requests, with a model on each machine and as many requests on each."""
    share = -(-batch // servers)
    rate = tensor_rate(s, bits, chip, share, context, 1, None)
    return rate and rate * batch / share


def table(
    chip: Chip, links: dict[str, Link], ranks: Sequence[int], batches: Sequence[int], context: int
) -> list[str]:
    columns = ["model", "weights", "requests", "one"]
    for n in ranks:
        columns += [f"{n} servers", *(f"{n} ranks, {name}" for name in links)]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for (model, s), (kind, bits) in ((m, w) for m in MODELS.items() for w in WEIGHTS.items()):
        for batch in batches:
            case = s, bits, chip, batch, context
            rates = [data_rate(*case, 1)]
            for n in ranks:
                rates += [data_rate(*case, n), *(tensor_rate(*case, n, x) for x in links.values())]
            cells = [f"{rate:,.0f}" if rate else "-" for rate in rates]
            lines.append(f"| {' | '.join([model, kind, str(batch), *cells])} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chip", choices=CHIPS, default="M4 Max")
    parser.add_argument("--link", nargs=2, type=float, metavar=("MICROSECONDS", "GB_PER_S"))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=2048, help="tokens of each request")
    args = parser.parse_args(argv)
    if min([*args.ranks, *args.batches, args.context]) < 1 or min(args.link or [1]) <= 0:
        parser.error("--ranks, --batches, --context and --link must be above 0")
    links = {"link": Link(*args.link, mesh=True)} if args.link else LINKS
    print(
        f"Predicted tokens/s of all requests, {args.chip}, contexts of {args.context:,} tokens.\n"
    )
    print("\n".join(table(CHIPS[args.chip], links, args.ranks, args.batches, args.context)))
    return 0


if __name__ == "__main__":
    run_main(main)
