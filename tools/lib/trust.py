"""Starts engines at once: every kernel is used, for all rows that it takes.

    python -m tools.lib.trust serve MODEL --port 8000      this server, with its flags

On MLX CUDA a first start compiles for minutes, for its checks, trials and timings, and keeps no
compiled kernel.  That takes longer than a short measurement.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

from vllm_metal_lite import backend
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.specs import KernelUse


def faster_prefill(use: KernelUse) -> str:
    """The faster way for prompts, as measured: MLX's SDPA on CUDA, except for latents."""
    latents = any(shape.latent for shape in use.shapes)
    return "gather" if backend.name() == "cuda" and not latents else "varlen"


@contextmanager
def trusted(prefill: str | None = None, products: bool = True) -> Iterator[None]:
    """Engines made inside this context check, try and time nothing.

    prefill: "varlen" or "gather"; None: `faster_prefill`.  products: kernels compute the products
    and the experts, for all rows that they take.
    """

    def rows(field: str) -> Callable[..., range]:
        return lambda packed, attention, fusion, ranks: (
            getattr(fusion, field) if products else range(0)
        )

    with (
        patch.object(verdicts, "verify", lambda use: Verdict({}, prefill or faster_prefill(use))),
        patch.object(decide._Trials, "problem", lambda *_: None),
        patch.object(decide, "faster_rows", rows("skinny_rows")),
        patch.object(decide, "faster_expert_rows", rows("expert_rows")),
    ):
        yield


def add_trusted(parser: argparse.ArgumentParser) -> None:
    text = "every kernel for all rows; no checks or timings"
    parser.add_argument("--trusted", action="store_true", help=text)


def as_asked(args: argparse.Namespace) -> AbstractContextManager[None]:
    """`trusted`, if the option was given."""
    return trusted() if args.trusted else nullcontext()


if __name__ in ("__main__", "__mp_main__"):  # the server, and the process of its engine
    _trusted_for_the_process = trusted()
    _trusted_for_the_process.__enter__()

if __name__ == "__main__":
    from vllm_metal_lite.cli.main import main

    sys.exit(main())
