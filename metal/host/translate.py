"""Turns Metal source into C++ that the headers in cpu/ can compile.

The text stays as it is but for one rewrite: `threadgroup T a[N];` becomes a reference to storage
that the threads share. Quoted includes are put in place, so that the rewrite reaches them too, and
`#line` directives keep the file and line of every statement.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .faults import HostError
from .toolchain import HEADERS, Unit

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<(metal_\w+)>)[^\n]*$', re.M)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.M)
# The declaration `threadgroup T a[N], b;`, and each of its names with its extents.
SHARED = re.compile(
    r"\bthreadgroup\s+(?P<type>(?:[\w:]+(?:\s*<[^;(){}]*>)?\s+)+?)"
    r"(?P<names>\w+\s*(?:\[[^;{}]*\])?(?:\s*,\s*\w+\s*(?:\[[^;{}]*\])?)*)\s*;"
)
SHARED_NAME = re.compile(r"(\w+)\s*((?:\[[^,]*\])?)\s*(?:,|$)")
_CONSTANT = re.compile(r"(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]")
_INSTANTIATION = re.compile(r"\btemplate\s*\[\[\s*host_name\b[^\]]*\]\]\s*\[\[\s*kernel\s*\]\]")
_SHARED_ARGUMENT = re.compile(r"\[\[\s*threadgroup\s*\(\s*\w+\s*\)\s*\]\]")
# Unrolled loops would only take time to compile.
_UNROLL = re.compile(
    r'_Pragma\("(?:clang loop|unroll)[^"]*"\)|^\s*#\s*pragma\s+(?:clang\s+loop|unroll)[^\n]*', re.M
)
_ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?")


def without_comments(text: str) -> str:
    """The text with comments blanked out, at the same positions.  What is in quotes stays."""
    return _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its name, its binding, and whether it is a reference."""

    name: str
    attribute: str  # "buffer", "threadgroup", or an attribute such as "thread_position_in_grid"
    index: int = 0
    reference: bool = False

    def argument(self) -> str:
        if self.attribute == "buffer":
            kind = "reference" if self.reference else "pointer"
            return f"metal_host::{kind}_argument({self.index})"
        if self.attribute == "threadgroup":
            return f"metal_host::shared_argument({self.index})"
        return f"metal_host::attribute_{self.attribute}()"


def expand_includes(text: str, name: str, include_dirs: Sequence[Path]) -> str:
    """The text with every quoted include in place; Apple's own headers are dropped.

    name: what `#line` calls it.  include_dirs: searched in order, after this package's
    replacements.  Raises HostError if a header is in none of the folders.
    """
    seen: set[Path] = set()

    def expand(body: str, label: str) -> str:
        def put(match: re.Match) -> str:
            line = body.count("\n", 0, match.start()) + 1
            if match[2]:
                return ""  # one of <metal_...>: included before everything
            path = _find(match[1], include_dirs, f"{label}:{line}")
            if path in seen:
                return ""
            header = path.read_text()
            if _PRAGMA_ONCE.search(header):
                seen.add(path)
            inner = expand(_PRAGMA_ONCE.sub("", header), str(path))
            return f'#line 1 "{path}"\n{inner}\n#line {line + 1} "{label}"'

        return _INCLUDE.sub(put, body)

    return f'#line 1 "{name}"\n{expand(text, name)}\n'


def _find(name: str, include_dirs: Sequence[Path], where: str) -> Path:
    for folder in (HEADERS / "replaced", *include_dirs):
        if (path := Path(folder) / name).is_file():
            return path
    raise HostError(
        f"{where} includes {name}, which is in none of {[str(d) for d in include_dirs]}"
    )


def share_threadgroup_variables(text: str) -> str:
    """`threadgroup T a[N], b;` becomes a reference to shared storage for each name."""
    blank = without_comments(text)
    pieces, at, number = [], 0, 0
    for match in SHARED.finditer(blank):
        declarations = []
        for name, extent in SHARED_NAME.findall(match["names"]):
            declarations.append(
                f"{match['type'].strip()} (&{name}){extent} = "
                f'metal_host::Shared{{{number}, "{name}"}};'
            )
            number += 1
        lines = "\n" * match[0].count("\n")
        pieces += [text[at : match.start()], " ".join(declarations), lines]
        at = match.end()
    return "".join(pieces) + text[at:]


def kernel_parameters(text: str, function: str) -> list[Parameter]:
    """The parameters of the kernel `function`, in order.  Raises HostError if there is none."""
    blank = without_comments(text)
    head = re.search(rf"\bkernel\b[^;{{}}]*?\bvoid\s+{re.escape(function)}\s*\(", blank)
    if not head:
        raise HostError(f"there is no kernel {function!r} in the source")
    parameters: list[Parameter] = []
    free = 0  # a buffer without an index gets the next one
    for part in _split_arguments(blank, head.end()):
        attributes = dict(_ATTRIBUTE.findall(part))
        declared = part.split("[[")[0].strip()
        name = re.search(r"(\w+)\s*(\[\w*\]\s*)*$", declared)[1]  # "x", or the array "x[3]"
        reference = "&" in declared
        known = [a for a in attributes if a not in ("buffer", "threadgroup", "function_constant")]
        if "threadgroup" in attributes:
            parameters.append(Parameter(name, "threadgroup", int(attributes["threadgroup"])))
        elif known:
            parameters.append(Parameter(name, known[0]))
        else:
            index = int(attributes.get("buffer") or free)
            free = index + 1
            parameters.append(Parameter(name, "buffer", index, reference))
    return parameters


def _split_arguments(text: str, start: int) -> list[str]:
    """The comma-separated parts between the parenthesis before `start` and its partner."""
    parts, depth, begin = [], 0, start
    for at in range(start, len(text)):
        character = text[at]
        if character in "([{<":
            depth += 1
        elif character in "}]>" or (character == ")" and depth):
            depth -= 1
        elif character == ")" or (character == "," and not depth):
            parts.append(text[begin:at])
            begin = at + 1
            if character == ")":
                break
    return [part for part in parts if part.strip()]


def translate(text: str, function: str, prelude: str = "") -> tuple[Unit, list[Parameter]]:
    """A C++ translation unit that runs one kernel, and the kernel's parameters.

    text: Metal source without quoted includes (see `expand_includes`).  function: the kernel, with
    its template arguments if it is a template.  prelude: what other texts have before them too.
    """
    parameters = kernel_parameters(text, function.split("<")[0].strip())
    found = _CONSTANT.findall(without_comments(text))
    constants = {index: name for name, index in found}
    cases = "".join(
        f"    case {index}: {name} = *static_cast<const decltype({name})*>(value); break;\n"
        for index, name in constants.items()
    )
    unset = " ".join(f"{name} = {{}};" for name in constants.values())
    arguments = ",\n      ".join(parameter.argument() for parameter in parameters)
    text = _INSTANTIATION.sub("template", share_threadgroup_variables(text))
    text = _UNROLL.sub("", _SHARED_ARGUMENT.sub("", text))
    body = f"""{text}
#line 1 "entry"
extern "C" HOST_INTERNAL void metal_host_kernel() {{
  auto* const kernel_function = {function};
  kernel_function(
      {arguments});
}}
#define HOST_SETTER HOST_EXPORT __attribute__((no_sanitize("thread"))) void
HOST_SETTER metal_host_unset_constants() {{ {unset} }}
HOST_SETTER metal_host_constant(unsigned index, const void* value) {{
  switch (index) {{
{cases}  }}
}}
"""
    return Unit(f'#include "metal_stdlib"\n{_UNROLL.sub("", prelude)}', body), parameters
