"""Which cases a plain run of the tests leaves out."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import MANY, ONE_IN, most_of_many


def cases(function, number):
    return [
        SimpleNamespace(path=Path("file"), cls=None, originalname=function, name=f"{function}[{i}]")
        for i in range(number)
    ]


@pytest.mark.parametrize("number", [*range(1, 14), 300])
def test_a_quarter_of_many_cases_stays_and_all_of_few(number):
    items = cases("test_a", number) + cases("test_b", 2)
    stay = Counter(i.originalname for i in items if i not in most_of_many(items))
    assert stay == {"test_a": number if number < MANY else -(-number // ONE_IN), "test_b": 2}


def test_the_cases_that_stay_are_from_all_over_and_always_the_same():
    items = cases("test_a", 300)
    left_out = most_of_many(items)
    assert left_out == most_of_many(items[::-1])
    stay = [i for i, item in enumerate(items) if item not in left_out]
    for start in range(0, 300, 50):
        assert any(start <= i < start + 50 for i in stay)
    assert {i % 3 for i in stay} == {0, 1, 2}  # no factor of a product of parameters
