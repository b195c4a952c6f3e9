"""What all tests share."""

import gc
import hashlib
import os
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# Before anything imports MLX: tests run where mlx-lm's own CPU answers are the oracle, and never
# ask a network for a model.
os.environ.setdefault("METAL_LITE_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# One process a core: threads of a BLAS that wait for each other spin, and on a loaded machine an
# agent's task took 40 s instead of 16.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import vllm_metal_lite.backend  # noqa: F401  (loads a fast BLAS before anybody imports MLX)

# A shell that starts the tests in the background ignores Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

TESTS = Path(__file__).parent
# A test with fewer cases is always run with all of them.
MANY = 4


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=20,
        metavar="N",
        help=f"of a test in slow.txt with {MANY} and more cases, run one case in N (default: 20), "
        f"and of its random examples {MANY} in N",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run all cases, and the tests marked `long` or `thorough`",
    )
    parser.addoption("--long", action="store_true", help="run the tests marked `long` too")


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the folder of their parent
        # What tests find about pretended devices is not remembered.
        cache = tempfile.TemporaryDirectory()
        config.add_cleanup(cache.cleanup)
        os.environ["XDG_CACHE_HOME"] = cache.name
    if config.getoption("all_cases"):
        # Kernels on the CPU host count which of their lines run.
        os.environ.setdefault("METAL_LITE_HOST_COVERAGE", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Marks the tests of slow.txt, and leaves out most of their cases."""
    lines = (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    how = {TESTS / path: rest for path, *rest in filter(None, map(str.split, lines)) if path != "#"}
    if missing := [str(path) for path in how if not path.exists()]:
        raise pytest.UsageError(f"slow.txt names what is not there: {', '.join(missing)}")
    named = {
        file: next((how[path] for path in how if file.is_relative_to(path)), None)
        for file in {item.path for item in items}
    }
    for item in items:
        if named[item.path] is not None:
            item.add_marker(pytest.mark.slow)
    result = yield  # -k and -m
    if not config.getoption("all_cases"):
        dropped = {item for item in items if item.get_closest_marker("thorough")}
        if not config.getoption("long"):
            dropped.update(item for item in items if item.get_closest_marker("long"))
        one_in = config.getoption("one_in")
        sampled = [item for item in items if named[item.path] == []]
        dropped.update(most_of_many(sampled, one_in))
        try_fewer_examples(sampled, one_in)
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Slow files first: small ones at the end let all workers end at one time.
        long = {item.path for item in items if item.get_closest_marker("long")}
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in long, item.path not in slow))
    return result


def pytest_collection_finish():
    """Freeze imported objects: each garbage collection would scan them for 0.3 s."""
    gc.collect()
    gc.freeze()


def most_of_many(items, one_in):
    """The cases to skip: all but one in `one_in`, by a hash, so every run skips the same."""
    cases = defaultdict(list)
    for item in items:
        cases[item.path, item.cls, item.originalname].append(item)
    for some in cases.values():
        if len(some) >= MANY:
            some.sort(key=lambda item: hashlib.sha1(item.name.encode()).digest())
            yield from some[-(-len(some) // one_in) :]


def try_fewer_examples(items, one_in):
    """Keep MANY of every `one_in` examples of hypothesis."""
    for test in {item.obj for item in items}:
        if how := getattr(test, "_hypothesis_internal_use_settings", None):
            examples = max(1, min(1, MANY / one_in) * how.max_examples)
            test._hypothesis_internal_use_settings = settings(how, max_examples=int(examples))


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU; the CPU host executes its kernels."""
    from tests.support.kernels.device import gpu_on_host

    with gpu_on_host(monkeypatch, tmp_path):
        yield


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands over which lines of kernels it has run."""
    coverage = sys.modules.get("metal.host.coverage")
    if coverage and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernel_lines"] = coverage.marks()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if lines := getattr(node, "workeroutput", {}).get("kernel_lines"):
        from metal.host import coverage

        coverage.take(lines)


def pytest_terminal_summary(terminalreporter):
    """Names the lines of metal/*.metal that no test has run."""
    if coverage := sys.modules.get("metal.host.coverage"):
        for line in coverage.report():
            terminalreporter.write_line(line)
