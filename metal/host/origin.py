"""From which `.metal` file a kernel's text comes, so that messages name its lines."""

import functools
from collections.abc import Mapping
from pathlib import Path

KERNELS = Path(__file__).parents[1]


@functools.cache
def _files(folder: Path) -> tuple[tuple[Path, str], ...]:
    return tuple((path, path.read_text()) for path in sorted(folder.glob("*.metal")))


def _place(text: str, label: str) -> tuple[str, int]:
    """The file that holds the text and the line where it starts, or the label and line 1."""
    if text.strip():
        for path, whole in _files(KERNELS):
            if (at := whole.find(text)) >= 0:
                return f"metal/{path.name}", whole.count("\n", 0, at) + 1
    return label, 1


def mark_lines(generated: str, definition: Mapping) -> str:
    """MLX's generated text with `#line` directives around what the kernel's author wrote."""
    name = definition["name"]
    for part in ("header", "source"):
        text = definition[part]
        if not text.strip():
            continue
        before, found, after = generated.partition(text)
        if not found:
            continue
        label, line = _place(text, f"{name} ({part})")
        generated = f'{before}\n#line {line} "{label}"\n{found}\n#line 1 "{name}"\n{after}'
    return generated
