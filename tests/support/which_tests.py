"""A plugin of pytest: which tests run, and in which order.

All run but those marked `thorough`, those marked `long` without --long, and most cases of the files
and folders in slow.txt.  Behind a name there, "all" keeps all its cases.  All cases of a test whose
lines are new run, and each new case (news.py).  --all-cases runs all.
"""

import hashlib
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.news import News

TESTS = Path(__file__).parents[1]
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


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    mark_slow(items)
    result = yield  # -k and -m
    if not config.getoption("all_cases"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        new = News(TESTS.parent).new_among(slow)
        dropped = {item for item in items if item.get_closest_marker("thorough")} - new
        if not config.getoption("long"):
            dropped.update(item for item in items if item.get_closest_marker("long"))
        one_in = config.getoption("one_in")
        whole = {item for item in slow if "all" in item.get_closest_marker("slow").args}
        sampled = [item for item in slow if item not in whole | new]
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


def mark_slow(items):
    """Mark the tests of slow.txt as slow, with the word that follows their file or folder."""
    split = map(str.split, (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines())
    words = {TESTS / path: rest for path, *rest in filter(None, split) if path != "#"}
    if missing := [str(path) for path in words if not path.exists()]:
        raise pytest.UsageError(f"slow.txt names what is not there: {', '.join(missing)}")
    if unknown := [word for rest in words.values() for word in rest if word != "all"]:
        raise pytest.UsageError(f"slow.txt knows the word 'all' only, not {', '.join(unknown)}")
    for item in items:
        for path in (item.path, *item.path.parents):
            if path in words:
                item.add_marker(pytest.mark.slow(*words[path]))


def most_of_many(items, one_in):
    """Choose the cases to skip: all but one in `one_in`.  A hash chooses, so all runs agree."""
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
