"""Finds a C++ compiler and makes a shared library of a kernel's translation."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from .faults import HostError
from .options import HostOptions

HEADERS = Path(__file__).parent / "cpu"

_COMMON = ["-std=gnu++20", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing"]
_COMMON += ["-fsigned-char", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-w"]
# No optimisation: a test's launch takes less time than the optimiser would.
_PLAIN = ["-O0", "-fno-sanitize=all"]
# Every access and every undefined operation becomes a call, and has a line.
_CHECKED = ["-O0", "-g1", "-gdwarf-4", "-fsanitize=thread,undefined,float-cast-overflow"]
_CHECKED += ["-fno-sanitize=vptr,object-size", "-DMETAL_HOST_CHECKED"]

_KEEP_SECONDS = 7 * 86400  # how long unused compiled kernels are kept

_RUNTIME = ["runtime.cpp"]
_MEMORY = {False: ["memory.cpp"], True: ["checker.cpp", "hooks.cpp"]}


@cache
def zig() -> str | None:
    """The program of the package ziglang, whose clang compiles; None without the package."""
    if (spec := importlib.util.find_spec("ziglang")) is None:
        return None
    return str(Path(spec.submodule_search_locations[0]) / "zig")


def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler, for any CPU: zig's default is the CPU at hand."""
    return (zig(), "c++", "-mcpu=baseline")


@cache
def _version() -> str:
    command = [*compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, env=_environment()).stdout


@cache
def cache_dir() -> Path:
    """Where compiled kernels are kept: `METAL_LITE_HOST_CACHE`, or a folder of the user's own."""
    named = os.environ.get("METAL_LITE_HOST_CACHE")
    folder = Path(named or Path(tempfile.gettempdir()) / f"metal-host-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise HostError(f"{folder} belongs to another user: name one in METAL_LITE_HOST_CACHE")
    for file in folder.iterdir():
        if file.is_file() and time.time() - file.stat().st_mtime > _KEEP_SECONDS:
            file.unlink(missing_ok=True)
    return folder


def _environment() -> dict[str, str]:
    # zig keeps a cache of its own: beside ours, not in the user's home.
    zig = {f"ZIG_{kind}_CACHE_DIR": str(cache_dir() / "zig") for kind in ("LOCAL", "GLOBAL")}
    return {**os.environ, **zig}


@cache
def _runtime_hash() -> str:
    digest = hashlib.sha256("\0".join([*compiler(), _version()]).encode())
    for path in sorted(HEADERS.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise HostError(f"{what} does not compile:\n{done.stderr.strip()[:8000]}")


class Flavour(NamedTuple):
    """How a kernel is compiled."""

    checked: bool
    coverage: bool


def flavour(options: HostOptions) -> Flavour:
    return Flavour(options.checked, os.environ.get("METAL_LITE_HOST_COVERAGE") == "1")


def _kernel_flags(flavour: Flavour) -> list[str]:
    flags = [*(_CHECKED if flavour.checked else _PLAIN), "-I", str(HEADERS)]
    if flavour.coverage:
        flags += ["-fprofile-instr-generate", "-fcoverage-mapping", "-fprofile-update=single"]
    flags += ["-ftrivial-auto-var-init=pattern"]
    flags += ["-Xclang", "-cl-single-precision-constant"]
    flags += ["-Xclang", "-ffloat16-excess-precision=none", "-Wno-invalid-constexpr"]
    flags += ["-Wno-reserved-user-defined-literal"]
    # Reads count even if the same place is written next.
    flags += ["-mllvm", "-tsan-instrument-read-before-write"] if flavour.checked else []
    return flags


def _compile(source: Path, target: Path, flags: list[str], what: str) -> None:
    _run([*compiler(), *_COMMON, *flags, "-c", str(source), "-o", str(target)], what)


class Unit(NamedTuple):
    """A translation unit.  head: the part that many units share, such as Metal's library."""

    head: str
    body: str


@cache
def _head_flags(head: str, flags: tuple[str, ...]) -> list[str]:
    """Flags that put the head before a body, in compiled form, which is made once."""
    key = hashlib.sha256(repr((_runtime_hash(), str(HEADERS), flags, head)).encode()).hexdigest()
    header, compiled = (cache_dir() / f"{key[:32]}.{end}" for end in ("h", "pch"))
    if not header.exists():
        _write(header, lambda made: made.write_text(head))
    if not compiled.exists():
        # Another process may have written the same header a little later.
        options = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header", str(header)]
        command = [*compiler(), *_COMMON, *flags, *options]
        _write(compiled, lambda made: _run([*command, "-o", str(made)], "Metal's library"))
    return ["-include-pch", str(compiled)]


def _write(target: Path, make: Callable[[Path], object]) -> None:
    """Have `make` write a file that becomes `target` when it is whole."""
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        made = Path(scratch) / target.name
        make(made)
        made.replace(target)


def _runtime_objects(flavour: Flavour) -> list[str]:
    """The compiled runtime; each version is compiled once."""
    objects = []
    for name in [*_RUNTIME, *_MEMORY[flavour.checked]]:
        target = cache_dir() / f"{Path(name).stem}-{_runtime_hash()[:16]}.o"
        if not target.exists():
            flags = ["-O2", "-fno-sanitize=all"]
            _write(target, partial(_compile, HEADERS / name, flags=flags, what=name))
        objects.append(str(target))
    return objects


def build(unit: Unit, name: str, flavour: Flavour) -> Path:
    """The shared library of a translated kernel, from the cache if the same text was built before.

    Raises HostError if there is no compiler, or the text does not compile.
    """
    if zig() is None:
        raise HostError("no C++ compiler: pip install ziglang")
    flags = _kernel_flags(flavour)
    key = hashlib.sha256("\0".join([_runtime_hash(), *flags, *unit]).encode()).hexdigest()[:32]
    library = cache_dir() / f"{key}.so"
    if library.exists():
        for file in library, library.with_suffix(".cpp"):
            if file.exists():
                file.touch()
        return library
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        source, made = Path(scratch) / f"{key}.cpp", Path(scratch) / "kernel.o"
        source.write_text(unit.body)
        _compile(source, made, [*flags, *_head_flags(unit.head, tuple(flags))], f"kernel {name}")
        # No C++ library and no sanitizer's: the runtime needs neither.
        link = [*compiler(), "-shared", "-O2", "-fno-sanitize=all", str(made)]
        link += [*_runtime_objects(flavour), "-nostdlib++"]
        if sys.platform != "darwin":
            link += ["-lm", "-ldl", "-Wl,--no-gc-sections"]  # no other code names the counters
        linked = Path(scratch) / library.name
        _run([*link, "-o", str(linked)], f"the library of kernel {name}")
        if flavour.coverage:
            source.replace(library.with_suffix(".cpp"))
        linked.replace(library)
    return library
