"""A strict front end for Metal source: says what Apple's compiler would refuse.

`check(source)` compiles the text, to nothing, in clang's "C++ for OpenCL" mode.  The address spaces
it has and what it leaves out (double, virtual, exceptions, new, function pointers, variable-length
arrays, the C++ library) are close to Metal's; the headers in `strict/` declare Metal's library for
it.  What it accepts and Metal does not is found in clang's syntax tree or by token.

Some rules are stricter than Apple's, so that one source also compiles as C++ and as CUDA:
`threadgroup` variables stand at the top of a kernel's body, and there are no lambdas.  It is not
Apple's compiler: what passes here may still be refused there, and constructors or conversions
qualified `thread` (MLX's steel headers) are refused here for temporaries though Apple takes them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .faults import HostError
from .mlx_source import INCLUDE, UTILS
from .strict_tree import Violation, in_metal, tree_violations
from .toolchain import zig
from .translate import SHARED, SHARED_NAME, without_comments

MAX_THREADGROUP_BYTES = 32768

_WHOLE = re.compile(r'#\s*include\s*(<metal_stdlib>|"mlx/)')
_HEADERS = Path(__file__).parent / "strict"
_CLANG = [
    *("clang", "-cc1", "-x", "clcpp", "-cl-std=clc++2021"),
    *("-cl-single-precision-constant", "-fdeclspec", "-Wno-everything"),
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
    *("-D__METAL__", "-D__METAL_VERSION__=310", "-I", str(_HEADERS), "-I", str(INCLUDE)),
]
# Any target with address spaces does; this one has bfloat too, in LLVM 20 already.
_CHECK = ("-triple", "amdgcn-amd-amdhsa", "-ast-dump")
# Warnings that are violations: wrong in any C++, or (the first) an error in Metal.
_WARNINGS = (
    "implicit-float-conversion",
    "no-implicit-int-float-conversion",
    "constant-conversion",
    "integer-overflow",
    "division-by-zero",
    "array-bounds",
    "uninitialized",
    "return-type",
    "unused-value",
    "tautological-constant-out-of-range-compare",
)
_BANNED = {
    "goto": r"\bgoto\b",
    "asm": r"\b(asm|__asm__|__asm)\b",
    "lambda": r"(?<![\w\])\[])\[[\s&=\w,]*\](?!\])\s*(\(|\{|mutable\b|->)",
    "kernel": r"\[\[\s*kernel\b[^\]]*\]\]\s*(?!void\b|decltype\b|\[|\s)\w+",
    "opencl": r"\b__(global|local|private|generic|constant|kernel)\b",
}


def check(source: str) -> list[Violation]:
    """The parts of `source` that Apple's compiler would refuse, in the order of lines.

    `source` is a Metal text as `mx.fast.metal_kernel` generates it: MLX's `utils.h` comes before
    it, as in MLX.  Or a whole one, which includes <metal_stdlib> or headers of MLX's itself.

    Raises HostError if clang is missing.
    """
    text = without_comments(source)
    found = [
        Violation(rule, _line(text, match.start()), f"`{match[0].strip()}` is not allowed")
        for rule, pattern in _BANNED.items()
        for match in re.finditer(pattern, text)
    ]
    options = [*_CHECK, *(f"-W{name}" for name in _WARNINGS)]
    try:
        done = compile_metal(source, options)
    except ValueError:
        return [*found, Violation("compiler", 0, "brackets do not match")]
    found += _diagnostics(done.stderr)
    if done.returncode == 0:
        found += tree_violations(done.stdout)
    elif not found:
        raise HostError(f"clang failed: {done.stderr[-2000:]}")
    return sorted(set(found), key=lambda v: (v.line, v.rule, v.message))


def compile_metal(source: str, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run clang with `options` on a Metal text (see `check`).  Raises ValueError if brackets do not
    match, HostError if clang is missing."""
    if zig() is None:
        raise HostError("the strict front end needs clang: pip install ziglang")
    lowered = _lower(without_comments(source))
    prelude = [] if _WHOLE.search(source) else ["-include", UTILS]
    command = [zig(), *_CLANG, *prelude, *options, "-"]
    return subprocess.run(command, input=lowered, capture_output=True, text=True, check=False)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# --- Metal that OpenCL mode does not read, made readable, line by line ----------------------------


def _lower(text: str) -> str:
    """Rewrite kernels' `threadgroup` variables, function constants and instantiations.

    A `threadgroup` variable may stand only at the top of a kernel's body: there it becomes a
    reference; anywhere else clang refuses it.  Raises ValueError if brackets do not match.
    """
    text = re.sub(
        r"(\bconstant\s+(?:bool|u?int|u?short|float)\s+\w+)\s*\[\[\s*function_constant\([^\]]*\]\]",
        r"\1 = 0",
        text,
    )
    attributes = r"\[\[[^\]]*\]\]\s*"
    text = re.sub(
        rf"\btemplate\s+((?:{attributes})+)(?=decltype|void)",
        lambda m: "template " + re.sub(r"[^\n]", " ", m[1]),
        text,
    )
    done, position = [], 0
    for match in re.finditer(
        rf"\[\[\s*kernel\b[^\]]*\]\]\s*(?:{attributes})*|\bkernel\s+(?=void)", text
    ):
        if match.start() < position:
            continue
        start = text.index("{", _closing(text, text.index("(", match.end())))
        end = _closing(text, start)
        # `kernel` itself is a word of OpenCL with rules of its own.
        done.append(text[position : match.start()] + re.sub(r"[^\n]", " ", match[0]))
        done.append(text[match.end() : start] + _lower_body(text[start : end + 1]))
        position = end + 1
    return "".join(done) + text[position:]


_TOO_MUCH = "too much threadgroup memory"


def _lower_body(body: str) -> str:
    """A kernel's body with its `threadgroup` variables as references and their sum checked."""
    sizes: list[str] = []

    def lower(match: re.Match[str]) -> str:
        if body.count("{", 0, match.start()) - body.count("}", 0, match.start()) != 1:
            return match[0]
        kind, lowered = match["type"].strip(), []
        for name, extents in SHARED_NAME.findall(match["names"]):
            variable = f"(&{name}){extents}" if extents else f"&{name}"
            value = f"metal::threadgroup_variable<{kind}{extents}>()"
            lowered.append(f"threadgroup {kind} {variable} = {value};")
            sizes.append(f"(sizeof({name}) + 15) / 16 * 16")
        # A check at each declaration: the error names the line of the first one that is too large.
        total = f"{' + '.join(sizes)} <= {MAX_THREADGROUP_BYTES}"
        lowered.append(f'static_assert({total}, "{_TOO_MUCH}");')
        return " ".join(lowered) + "\n" * match[0].count("\n")

    return SHARED.sub(lower, body)


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`; ValueError if there is none."""
    depth, pair = 0, {"(": "()", "{": "{}"}[text[start]]
    for match in re.compile(rf"[{re.escape(pair)}]").finditer(text, start):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"no end of the bracket in line {_line(text, start)}")


# --- clang's messages -----------------------------------------------------------------------------


_DIAGNOSTIC = re.compile(
    r"^(?P<file>\S.*?):(?P<line>\d+):\d+: (?P<kind>(fatal )?error|warning|note): (?P<text>.*)", re.M
)
_TO_BFLOAT = re.compile(r"to '[^']*(bfloat|__bf16)")


def _diagnostics(stderr: str) -> Iterator[Violation]:
    """Errors and the chosen warnings; one in a header counts where the text made it happen."""
    pending: Violation | None = None
    for match in _DIAGNOSTIC.finditer(stderr):
        here = int(match["line"]) if match["file"] == "<stdin>" else 0
        message = in_metal(match["text"])
        if match["kind"] == "note":
            if pending and pending.line == 0 and here:
                pending = replace(pending, line=here)
            if pending and message.startswith("expression evaluates to"):
                pending = replace(pending, message=f"{pending.message}: {message}")
            continue
        if pending:
            yield pending
        pending = Violation("compiler", here, message)
        if "implicit-float-conversion" in message:
            # float narrows to half silently in Metal too; to bfloat it does not.
            pending = replace(pending, rule="bfloat") if _TO_BFLOAT.search(message) else None
        elif message.startswith("non-kernel function variable"):
            message = "a threadgroup variable stands at the top of a kernel, without a value"
            pending = Violation("threadgroup", here, message)
        elif message.endswith(_TOO_MUCH):
            pending = replace(pending, rule="threadgroup")
    if pending:
        yield pending
