"""From MLX's text of a Metal kernel to the code that Mesa's compiler makes for an Apple GPU.

text -> C++ for OpenCL -> SPIR-V (ziglang's clang) -> AGX code (Mesa, in the folder of setup.sh).
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from metal.host.texts import KernelText
from metal.host.translate import without_comments
from vllm_metal_lite import MetalLiteError

HERE = Path(__file__).parent
_LANGUAGE = ("-x", "clcpp", "-cl-std=clc++2021", "-cl-single-precision-constant")
_OUTPUT = ("-Wno-everything", "-triple", "spirv64", "-O2", "-emit-obj")
_EXTENSIONS = "+cl_khr_fp16,+__opencl_c_generic_address_space,+__opencl_c_subgroups"
_INCLUDED = ("-include", str(HERE / "metal.h"), f"-cl-ext={_EXTENSIONS}")
_CLANG = (sys.executable, "-m", "ziglang", "clang", "-cc1", *_LANGUAGE, *_OUTPUT, *_INCLUDED)
_OF_OURS = ("-fno-unroll-loops",)  # except those that a pragma names
# Mesa's OpenCL has no memset, and clang would make one of a loop that writes zeros.
_OF_MLX = ("-fno-builtin", "-include", str(HERE / "mlx.h"))
_SHIM = {
    "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libasahi_noop_drm_shim.so",
    "RUSTICL_ENABLE": "asahi",
    "AGX_MESA_DEBUG": "shaderdb",
    "MESA_SHADER_CACHE_DISABLE": "true",
}
# Subgroup ids, because LLVM's SPIR-V writer fails on what it makes of a local id.
_THREAD = "get_sub_group_id() * 32u + get_sub_group_local_id()"
_BUILTINS = {
    name: ", ".join(f"(uint){of}({axis})" for axis in range(3))
    for name, of in (
        ("thread_position_in_grid", "get_global_id"),
        ("threadgroup_position_in_grid", "get_group_id"),
        ("threadgroups_per_grid", "get_num_groups"),
        ("threads_per_threadgroup", "get_local_size"),
    )
} | {
    "thread_position_in_threadgroup": f"{_THREAD}, 0u, 0u",
    "thread_index_in_threadgroup": _THREAD,
    "simdgroup_index_in_threadgroup": "get_sub_group_id()",
    "thread_index_in_simdgroup": "get_sub_group_local_id()",
}
_PARTS = re.compile(
    r"(?P<before>.*?)(?:template <(?P<names>[^<>]*)>\s*)?"
    r"\[\[kernel\]\] void \w+\((?P<arguments>.*?)\) \{(?P<body>.*)\}\s*"
    r"(?:template \[\[host_name\(.*?decltype\(\w+<(?P<values>.*)>\).*)?\Z",
    re.S,
)
_LINE = re.compile(
    r"CS shader: (\d+) instrs.* (\d+) gprs,.* (\d+) scratch, (\d+) threads,.*"
    r" (\d+):(\d+) spills:fills"
)


class AgxError(MetalLiteError):
    """A kernel that the chain cannot compile, or a chain that is not there."""


class Code(NamedTuple):
    """Of a kernel: its instructions, 16-bit registers of a lane (256 at most), bytes of scratch
    memory, the largest threadgroup that fits, and the stores and loads of spilled registers."""

    instructions: int
    registers: int
    scratch: int
    threads: int
    spills: int
    fills: int


def to_opencl(text: KernelText) -> str:
    """The kernel "k" in C++ for OpenCL, with the template's values in place."""
    blank = re.sub(r"#include <[^>]*>", "", without_comments(text.text))
    parts = _PARTS.match(blank)
    if parts is None:
        raise AgxError(f"{text.kernel}: not a text of mx.fast.metal_kernel")
    names = [n.strip() for n in (parts["names"] or "").split(",") if n.strip()]
    values = [v.strip() for v in (parts["values"] or "").split(",") if v.strip()]
    constants = []
    for declared, value in zip_longest(names, values):
        kind, name = declared.split(" =")[0].rsplit(" ", 1)
        value = value or declared.split("= ")[1]
        of = f"typedef {value} {name};", f"constexpr {kind} {name} = {value};"
        constants.append(of[kind != "typename"])
    arguments, locals_ = [], []
    for argument in re.split(r",(?![^\[]*\]\])", parts["arguments"]):
        declared = re.sub(r"\[\[.*?\]\]", "", argument).strip()
        kind, name = declared.rsplit(" ", 1)
        attribute = re.search(r"\[\[(\w+)\]\]", argument)
        if attribute and attribute[1] in _BUILTINS:
            locals_.append(f"{kind} {name} = {{{_BUILTINS[attribute[1]]}}};")
        elif reference := re.fullmatch(r"(?:const )?constant (\w+)&", kind):
            arguments.append(f"const __global {reference[1]}* {name}_given")
            locals_.append(f"const {reference[1]} {name} = {name}_given[0];")
        else:
            arguments.append(f"{kind.replace('constant', '__global')} {name}")
    head = [parts["before"], *constants]
    threads = f"__attribute__((reqd_work_group_size({text.threads}, 1, 1)))"
    begin = f"{threads} __kernel void k({', '.join(arguments)}) {{"
    source = "\n".join([*head, begin, *locals_, parts["body"], "}\n"])
    return re.sub(r"\b(u?int2|uint4|float4|short2|ulong[23])\(", r"make_\1(", source)


def compile_all(root: Path, texts: Sequence[KernelText]) -> list[Code]:
    """The code of each kernel.  root: the folder of setup.sh.  Raises AgxError."""
    said = re.split(r"^FILE .*$", _said(root, texts), flags=re.M)[1:]
    found = [_LINE.findall(one) for one in said]
    for text, lines, all_lines in zip(texts, found, said, strict=True):
        if not lines:
            raise AgxError(f"{text.kernel}: Mesa: {all_lines[:1000]}")
    return [Code(*map(int, lines[-1])) for lines in found]


def _said(root: Path, texts: Sequence[KernelText]) -> str:
    """The reports of Mesa's compiler, by file."""
    if not (root / "agx" / "loader").exists():
        raise AgxError(f"{root}: no Mesa here: run {HERE / 'setup.sh'} {root}, as root, on Debian")
    with TemporaryDirectory(dir=root / "agx") as folder:
        inside, words = f"/agx/{Path(folder).name}", []
        for i, text in enumerate(texts):
            source, binary = Path(folder, f"{i}.clcpp"), Path(folder, f"{i}.spv")
            source.write_text(to_opencl(text))
            flags = _OF_MLX if text.kernel.startswith("mlx_") else _OF_OURS
            command = [*_CLANG, *flags, "-o", binary, source]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise AgxError(f"{text.kernel}: clang: {done.stderr[:1000]}")
            words += [f"{inside}/{i}.spv", str(text.threads)]
        settings = [f"{name}={value}" for name, value in _SHIM.items()]
        words = ["env", *settings, "/agx/loader", *words]
        how = {"capture_output": True, "text": True, "errors": "replace"}
        return subprocess.run(["chroot", root, *words], **how).stderr
