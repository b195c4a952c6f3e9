"""The Metal text that MLX makes of a custom kernel, taken from MLX itself.

`mx.fast.metal_kernel` prints the whole source, signature included, when it is called with
`verbose=True`; while a function is traced for export this happens on any machine, Metal or not.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from .faults import HostError

metal_kernel = mx.fast.metal_kernel  # MLX's own function, also while a stand-in is installed

# A smaller input is passed in `constant` memory, and a 0-d one by reference.
SMALL = 8


# MLX's headers: the wheels of all platforms carry those of the Metal kernels.
INCLUDE = Path(mx.__file__).parent / "include"
UTILS = "mlx/backend/metal/kernels/utils.h"
# The text that MLX puts before the source of every custom kernel, as one include.
PRELUDE = f'#include "{UTILS}"\n'


def generated_source(
    definition: Mapping,
    inputs: Sequence[mx.array],
    template: Sequence[tuple],
    output_dtypes: Sequence[mx.Dtype],
) -> str:
    """The text that MLX would hand to Metal's compiler, without its prelude.

    definition: the arguments of `mx.fast.metal_kernel`.  inputs: only the dtype, the number of
    dimensions and whether the size is below 8 matter.
    """
    kernel = metal_kernel(**definition)

    def call(*arrays):
        return kernel(
            inputs=list(arrays),
            template=list(template) or None,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
            verbose=True,
        )

    placeholders = [
        mx.zeros((1 if a.size < SMALL else SMALL,) + (1,) * (a.ndim - 1) if a.ndim else (), a.dtype)
        for a in inputs
    ]
    printed = _printed_while(lambda path: mx.export_function(path, call, *placeholders))
    parts = printed.split("```")
    if len(parts) < 3:
        raise HostError(f"MLX printed no source for kernel {definition['name']}: {printed[:200]!r}")
    text = "```".join(parts[1:-1]).removeprefix("\n")
    if template and not (name := oldest_name(text)).isidentifier():
        raise HostError(f"MLX 0.32.2 would name the kernel {name}, which is not an identifier")
    return text


def oldest_name(text: str) -> str:
    """The name in a text of `generated_source` that has a template, as the oldest MLX allowed on a
    Mac makes it.

    MLX before 0.32.4 puts template values in the name as they are, and replaces <, > and commas
    only.  So a negative value leaves its sign there.
    """
    name, values = re.search(r"decltype\((\w+)<(.*?)>\)", text).groups()
    values = values.replace(", ", "_")
    return name.replace(re.sub(r"\W", "_", values), values, 1)


def instantiation(text: str) -> str:
    """The kernel's name in a text of `generated_source`, with its template arguments."""
    if found := re.search(r"\[\[kernel\]\] decltype\((.*?)\) ", text):
        return found[1]
    return re.search(r"\[\[kernel\]\] void (\w+)\(", text)[1]


def _printed_while(act) -> str:
    """The text that C++ code writes to standard output while `act(path of a scratch file)` runs."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as caught:
        saved = os.dup(1)
        try:
            os.dup2(caught.fileno(), 1)
            act(os.path.join(folder, "traced.mlxfn"))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        caught.seek(0)
        return caught.read().decode()
