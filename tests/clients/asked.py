"""The tools, schemas and texts that all programs here use."""

import math
import sys

from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"
HELLO, NEWS = "Hello there.", "It is sunny in Lisbon."
WEATHER = "What is the weather in Lisbon?"


class City(BaseModel):
    """A city."""

    city: str
    degrees: int


LISBON = City(city="Lisbon", degrees=21)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def check(found, wanted) -> None:
    assert found == wanted, found


def check_vectors(several, one) -> None:
    """The second of several texts is the one text, whose embedding has the length 1."""
    assert math.isclose(math.hypot(*one), 1, rel_tol=1e-3)
    assert math.dist(several[1], one) < 1e-3 < math.dist(several[0], one)
