"""Finds code that clang accepts and Metal does not, in the dump of clang's syntax tree.

Only the checked text is searched, which clang reads as `<stdin>`; MLX's headers are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One thing that Metal would refuse.

    `rule` is "compiler" or the name of a rule of ours; `line` counts from 1 in the checked text and
    is 0 when the fault is in a header.
    """

    rule: str
    line: int
    message: str


_SPACE_NAMES = {
    "__global": "device",
    "__constant": "constant",
    "__local": "threadgroup",
    "__private": "thread",
    "__generic": "generic",
    "local address space": "threadgroup address space",
}


def in_metal(message: str) -> str:
    """Address spaces by Metal's names; `generic` is what OpenCL makes of none."""
    for opencl, metal in _SPACE_NAMES.items():
        message = message.replace(opencl, metal)
    return message.replace(" *thread'", " *'").replace(" &thread'", " &'")


_NODE = re.compile(r"^(?P<indent>[ |`-]*)(?P<kind>\w+) 0x(?P<id>[0-9a-f]+)(?P<rest>.*)$")
_PLACE = re.compile(r"line:(?P<same>\d+):\d+|(?P<file><[\w ]+>|[^\s<>,:]+):(?P<line>\d+):\d+")
_CALLEE = re.compile(
    r"(?:Function|CXXMethod|CXXConversion) 0x([0-9a-f]+) '|(?:->|\.)\S+ 0x([0-9a-f]+)"
)
_FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConversionDecl", "CXXConstructorDecl")
_VARIABLES = ("VarDecl", "ParmVarDecl", "FieldDecl")
_SPACES = re.compile(r"__(global|constant|local|private)\b")
# Swizzles are methods in our headers.
_VECTOR = re.compile(r"\bvec<|\b(u?(char|short|int|long)|half|b?float|bool)[234]\b")
_BITS = {"int": 32, "uint": 32, "unsigned int": 32, "long": 64, "ulong": 64, "unsigned long": 64}


@dataclass
class _Node:
    """A row of the dump: `head` comes before the type, `type` is as clang prints it."""

    depth: int
    last: bool
    kind: str
    ident: str
    head: str
    type: str
    rest: str
    line: int  # 0: in a header

    @property
    def name(self) -> str:
        return (self.head.split() or ["?"])[-1]


def _nodes(dump: str) -> Iterator[_Node]:
    """Rows of clang's dump, from the first of the checked text.

    Places are relative to the row before, so every row from there on is read.
    """
    start = dump.rfind("\n", 0, max(dump.find("<stdin>:"), 0)) + 1
    file, line = "", 0
    for row in dump[start:].splitlines():
        match = _NODE.match(row)
        if not match:
            continue
        head, _, typed = match["rest"].partition("'")
        for place in _PLACE.finditer(re.sub(r"\(anonymous[^)]*\)", "", head)):
            file, line = place["file"] or file, int(place["line"] or place["same"])
        yield _Node(
            depth=len(match["indent"]),
            last=match["indent"].endswith("`-"),
            kind=match["kind"],
            ident=match["id"],
            head=head,
            type=typed.split("'")[0],
            rest=match["rest"],
            line=line if file == "<stdin>" else 0,
        )


def tree_violations(dump: str) -> Iterator[Violation]:
    """The violations in the text: unqualified pointers and methods, long shifts, recursion."""
    path: list[_Node] = []  # from the root to the current node
    calls: dict[str, set[str]] = {}
    first: dict[str, str] = {}  # a function's id -> the id of its first declaration
    named: dict[str, _Node] = {}  # the functions of the text
    for node in _nodes(dump):
        while path and path[-1].depth >= node.depth:
            path.pop()
        if node.kind in _FUNCTIONS:
            previous = re.search(r"\bprev 0x([0-9a-f]+)", node.head)
            first[node.ident] = first.get(previous[1], previous[1]) if previous else node.ident
            if node.line:
                named.setdefault(first[node.ident], node)
        elif owner := next((n for n in reversed(path) if n.kind in _FUNCTIONS), None):
            for callee in _CALLEE.finditer(node.rest):
                calls.setdefault(first[owner.ident], set()).add(callee[1] or callee[2])
        if node.line:
            yield from _unqualified(node, path)
            yield from _long_shift(node, path)
        path.append(node)
    for ident, node in named.items():
        if _reaches(ident, calls, first):
            yield Violation("recursion", node.line, f"`{node.name}` calls itself")


def _unqualified(node: _Node, path: list[_Node]) -> Iterator[Violation]:
    """Pointers and references say where they point; a method says where its object may be."""
    declared = node.type.split("(")[0] if node.kind in _FUNCTIONS else node.type
    declared = re.sub(r"\[.*?\]", "[]", declared)  # a size may be a product
    bare = "__generic" in declared or (
        re.search(r"[*&]", declared) and not _SPACES.search(declared)
    )
    implicit = any(" implicit" in n.head for n in (node, *path[-1:]))  # a struct's implicit copy
    if bare and node.kind in (*_VARIABLES, *_FUNCTIONS) and not implicit:
        message = f"`{node.name}` needs an address space: '{declared.strip()}'"
        yield Violation("address-space", node.line, in_metal(message))
    if len(path) < 2 or path[-2].kind != "MemberExpr" or "bound member" not in path[-2].type:
        return
    converted, space = path[-1], _SPACES.search(node.type)
    if not space or space[1] == "private" or _VECTOR.search(node.type):
        return
    if converted.rest.endswith("<AddressSpaceConversion>"):
        message = f"a method of '{converted.type}' is not for an object in {space[0]}"
        yield Violation("address-space", node.line, in_metal(message))


def _long_shift(node: _Node, path: list[_Node]) -> Iterator[Violation]:
    """OpenCL defines a shift by the width or more; C++ and Metal do not."""
    if node.kind != "IntegerLiteral" or not node.last or not path:
        return
    shift, by = path[-1], int(node.rest.split()[-1])
    if re.search(r"'(<<|>>)'", shift.rest) and by >= _BITS.get(shift.type, by + 1):
        yield Violation("shift", node.line, f"a shift of '{shift.type}' by {by}")


def _reaches(function: str, calls: dict[str, set[str]], first: dict[str, str]) -> bool:
    """Whether calls lead from `function` back to it."""
    seen: set[str] = set()
    todo = [function]
    while todo:
        for callee in calls.get(todo.pop(), ()):
            callee = first.get(callee, callee)
            if callee == function:
                return True
            if callee not in seen:
                seen.add(callee)
                todo.append(callee)
    return False
