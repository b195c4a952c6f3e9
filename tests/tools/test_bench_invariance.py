"""The tool that counts answers that differ finds a difference, and says where and by how much."""

import pytest

from tools.bench.invariance import SETTINGS, Answer, differences, run
from tools.bench.lib.models import random_model


def test_the_first_difference_of_each_answer() -> None:
    alone = [Answer([1, 2, 3], [0.5, 0.25, 1.0]), Answer([4, 5, 6], [1.0] * 3)]
    other = [Answer([1, 7, 8], [0.5, 0.1, 1.0]), Answer([4, 5, 6], [1.0] * 3)]
    assert differences(alone, other) == [(1, 0.25)]
    assert differences(alone, alone) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_in_float32_no_setting_changes_a_token(name: str) -> None:
    model, prompts = random_model("128x2"), [[*range(i, 3 * i)] for i in range(20, 29)]
    alone = run(model, prompts, 6, **SETTINGS["alone"])
    assert min(len(answer.margins) for answer in alone) == 6
    assert min(margin for answer in alone for margin in answer.margins) > 1e-4
    assert differences(alone, run(model, prompts, 6, **SETTINGS[name])) == []
