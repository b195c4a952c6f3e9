"""The architecture: imports go down, and every import is seen.

Read off the source, so imports inside of functions and for type checkers count too.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "vllm_metal_lite"
ROOT = Path(__file__).parent.parent / PACKAGE

# From bottom to top.  The modules of one line do not import each other.
LAYERS = (
    ("errors",),
    ("envs", "rules"),
    ("pooling_params", "structured_params"),
    ("batch", "config", "outputs", "sampling_params"),
    ("scheduler",),
    ("speculation",),
    # From here on modules may know MLX.
    ("backend",),
    ("distributed",),
    ("devices", "links"),
    ("kv", "sampling", "specs"),
    ("kernels",),
    ("recurrence",),
    ("attention",),
    ("model", "structured_outputs"),
    ("runner",),
    # Optional rooms, and the door through which they reach the engine and the plugin.
    ("checks", "fusion", "images", "prefix_disk"),
    ("assembly",),
    # On top of the core.
    ("engine",),
    ("chat_formats",),
    ("benchmark", "server"),
    ("cli", "vllm_plugin"),
    # What the user imports and runs.
    ("__init__", "__main__"),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
MLX = ("mlx", "mlx_lm", "transformers", "torch", "vllm")

# Rooms that may be deleted, and the modules that import them.  The assembly does without them;
# the server needs `images`.
OPTIONAL = {
    "checks": {"assembly", "cli.doctor"},
    "fusion": {"assembly"},
    "images": {
        "assembly",
        "server.conversations",
        "server.model_text",
        "server.pictures",
        "server.worker.client",
        "server.worker.messages",
        "server.worker.process",
    },
    "prefix_disk": {"assembly", "cli.cache"},
}
# Modules that import others by a name made at run time.  None of them is in the core: the tests
# here would not see such an import.
BY_NAME = {"__init__", "cli.main"}
IMPORTERS = ("import_module", "__import__", "resolve_name")
# The plugin's imports of vLLM are not listed here.
FOR_TYPE_CHECKERS = {
    "__init__",  # whose names are loaded when they are first used
    "cli.startup",  # which says that it loads a model before it loads MLX
}


@dataclass(frozen=True)
class Import:
    """target: the dotted name below the package, or the whole name of a module of another one."""

    source: str
    target: str
    line: int
    own: bool
    for_type_checkers: bool

    def __str__(self) -> str:
        return f"{self.source.replace('.', '/')}.py:{self.line} imports {self.target}"


def _module(path: Path) -> str:
    *folders, name = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(folders if folders and name == "__init__" else [*folders, name])


FILES = {_module(path): path for path in sorted(ROOT.rglob("*.py"))}


# Read when a test runs: every worker of pytest-xdist imports this file.
@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text("utf-8")) for module, path in FILES.items()}


def _imports(module: str) -> Iterator[Import]:
    tree = trees()[module]
    checked = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", None) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, target = name.partition(".")
            own = top == PACKAGE
            if own:
                while target and target not in FILES:  # a class or function of a module
                    target = target.rpartition(".")[0]
                if not target:  # of the package itself: __version__
                    continue
            yield Import(module, target if own else name, node.lineno, own, id(node) in checked)


@cache
def imports() -> list[Import]:
    return [found for module in FILES for found in _imports(module)]


def own() -> list[Import]:
    return [found for found in imports() if found.own]


def layer(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_a_layer():
    assert {layer(module) for module in FILES} == set(HEIGHT)


def test_imports_go_down():
    wrong = [
        str(found)
        for found in own()
        if layer(found.source) != layer(found.target)
        and HEIGHT[layer(found.source)] <= HEIGHT[layer(found.target)]
    ]
    assert not wrong


def test_no_circle_within_a_layer():
    """No circle of modules, and none of folders."""

    def node(module: str) -> str:
        folder = module.rpartition(".")[0]
        return folder if "." in folder else module

    graph: dict[str, set[str]] = {}
    for found in own():
        for name in (lambda module: module), node:
            source, target = name(found.source), name(found.target)
            if source != target:
                graph.setdefault(source, set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_what_is_below_the_backend_knows_no_mlx():
    wrong = [
        str(found)
        for found in imports()
        if HEIGHT[layer(found.source)] < HEIGHT["backend"] and found.target.startswith(MLX)
    ]
    assert not wrong


def test_mlx_has_one_door():
    doors = {found.source for found in imports() if found.target.startswith("mlx.core")}
    assert doors == {"backend"}


def test_who_imports_by_name():
    """The front doors load late what they need."""
    callers = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if getattr(node, "attr", getattr(node, "id", getattr(node, "name", None))) in IMPORTERS
    }
    assert callers == BY_NAME


def test_optional_rooms_have_one_door():
    found: dict[str, set[str]] = {room: set() for room in OPTIONAL}
    for each in own():
        room = layer(each.target)
        if room in found and layer(each.source) != room:
            found[room].add(each.source)
    assert found == OPTIONAL


def test_imports_for_type_checkers_are_few():
    """They hide a module that is in the wrong place, or a circle."""
    found = {i.source for i in own() if i.for_type_checkers}
    assert found == FOR_TYPE_CHECKERS
    others = {i for i in imports() if i.for_type_checkers and not i.own}
    assert all(layer(i.source) == "vllm_plugin" and i.target.startswith("vllm.") for i in others)
