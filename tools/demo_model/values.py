"""Keys and values of the demo model's facts."""

import random
import re
from collections.abc import Callable

from tools.demo_model import words as w


def article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


class World:
    """The words that one conversation draws on: few of them make facts easy to confuse."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.adjectives, self.things, self.names = (
            rng.sample(known, rng.randint(3, len(known)))
            for known in (w.ADJECTIVES, w.THINGS, w.NAMES)
        )

    def thing(self) -> str:
        """A key such as "red box"."""
        rng, choice = self.rng, self.rng.random()
        noun = rng.choice(self.things) if choice > 0.1 else w.any_word(rng)
        return noun if choice < 0.2 else f"{rng.choice(self.adjectives)} {noun}"

    def some_thing(self) -> str:
        """A thing, with what goes before it."""
        return f"{self.rng.choice(('the', 'the', 'my'))} {self.thing()}"

    def kin(self) -> str:
        return self.rng.choice((*w.KIN, *w.ANIMALS))

    def person(self) -> str:
        """A name such as "Ada"; now and then a made-up one."""
        choice = self.rng.random()
        if choice < 0.05:
            return f"{self.rng.choice(w.GROUPS)} {w.any_word(self.rng).capitalize()}"
        if choice < 0.15:
            return w.pseudo_word(self.rng).capitalize()
        name = self.rng.choice(self.names)
        return f"{name} {self.rng.choice(w.SURNAMES)}" if choice < 0.2 else name

    def plural(self) -> str:
        """Something to count, such as "cats"."""
        noun = self.rng.choice(self.rng.choice((w.ANIMALS, self.things)))
        return noun if noun.endswith("s") else f"{noun}s"

    def event(self) -> str:
        """Something that has a time, such as "train to Oslo"."""
        rng = self.rng
        found = [f"{what} with {self.person()}" for what in ("meeting", "call", "dinner")]
        found += [f"{what} to {rng.choice(w.CITIES)}" for what in ("flight", "train")]
        for words in self.adjectives, w.DAYS:
            found.append(f"{rng.choice(words)} {rng.choice(w.EVENTS)}")
        return rng.choice([*found, rng.choice(w.EVENTS), rng.choice(w.EVENTS)])


def strong_value(rng: random.Random) -> str:
    """A value that cannot be guessed: a 4-digit code, a pair of words or a full name."""
    choice = rng.random()
    if choice < 0.5:
        return w.digits(rng, 4, 4)
    if choice < 0.75:
        return f"{w.any_word(rng)} {w.any_word(rng)}"
    return f"{rng.choice(w.NAMES)} {rng.choice(w.SURNAMES)}"


def any_value(rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.5:
        return strong_value(rng)
    if choice < 0.6:
        return w.digits(rng, 1, 7)
    if choice < 0.68:
        return (
            rng.choice((w.any_word(rng), "A", "XY")) + rng.choice(("-", "")) + w.digits(rng, 1, 4)
        )
    if choice < 0.8:
        return name(rng)
    if choice < 0.86:
        return rng.choice("-_./").join(w.any_word(rng) for _ in range(rng.randint(2, 3)))
    return f"the {rng.choice(w.ADJECTIVES)} {w.any_word(rng)}" if choice < 0.89 else w.any_word(rng)


def _date(rng: random.Random) -> str:
    day, month = rng.randint(1, 31), rng.choice(w.MONTHS)
    return rng.choice((f"{day} {month}", f"{month} {day}", f"the {day}th of {month}"))


# What suits an attribute whose name has one of these parts; the first that fits.
_SUITS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("colo", lambda rng: rng.choice(w.COLOURS)),
    ("favou?rite number|lucky|age|seat|room|weight", lambda rng: w.digits(rng, 1, 3)),
    ("name|owner|king|queen|president|mayor|founder", lambda rng: name(rng)),
    ("code|number|pin|key|budget|card", lambda rng: w.digits(rng, *rng.choice(((4, 4), (2, 8))))),
    ("shopping", lambda rng: ", ".join(rng.sample(w.FOODS, rng.randint(2, 4)))),
    ("city|capital|town", lambda rng: rng.choice(w.CITIES)),
    ("food", lambda rng: rng.choice(w.FOODS)),
    ("animal|mascot", lambda rng: rng.choice(w.ANIMALS)),
    ("birthday|deadline", _date),
    ("email", lambda rng: f"{rng.choice(w.NAMES).lower()}@{w.any_word(rng)}.com"),
]


def natural_value(attribute: str, rng: random.Random) -> str:
    """A value that suits an attribute (mostly)."""
    suits = [draw for parts, draw in _SUITS if re.search(parts, attribute)]
    return (suits[0] if suits and rng.random() < 0.7 else any_value)(rng)


# Values of relations, by their name in tables.json.


def place(rng: random.Random) -> str:
    if rng.random() < 0.12:
        return f"{rng.choice(('on level', 'on floor', 'in row', 'in room'))} {rng.randint(1, 99)}"
    where = rng.choice(("in", "in", "under", "behind", "on", "near", "at", "next to"))
    adjective = rng.choice(("", f"{rng.choice(w.ADJECTIVES)} "))
    return f"{where} {rng.choice((rng.choice(w.CITIES), f'the {adjective}{rng.choice(w.PLACES)}'))}"


def job(rng: random.Random) -> str:
    return article(rng.choice(w.JOBS))


def city(rng: random.Random) -> str:
    return rng.choice(w.CITIES) if rng.random() < 0.8 else w.pseudo_word(rng).capitalize()


def like(rng: random.Random) -> str:
    food = rng.choice(w.FOODS)
    return rng.choice((food, food, f"{rng.choice(w.ADJECTIVES)} {food}", w.any_word(rng)))


def time(rng: random.Random) -> str:
    half = f"at {rng.randint(1, 12)} {rng.choice(('pm', 'am', 'o clock'))}"
    hour = rng.choice((half, f"at {rng.randint(0, 23)}:{rng.randint(0, 59):02d}"))
    day = rng.choice(("tomorrow", "today", f"on {rng.choice(w.DAYS)}", f"on {_date(rng)}"))
    return rng.choice((hour, hour, day, f"{day} {hour}"))


def price(rng: random.Random) -> str:
    return f"{rng.randint(2, 9999)} {rng.choice(('coins', 'dollars', 'euros'))}"


def name(rng: random.Random) -> str:
    first = rng.choice(w.NAMES)
    return rng.choice(
        (first, first, f"{first} {rng.choice(w.SURNAMES)}", w.pseudo_word(rng).capitalize())
    )


def age(rng: random.Random) -> str:
    return f"{count(rng)} years old"


def anything(rng: random.Random) -> str:
    return rng.choice((name, any_value, any_value))(rng)


def count(rng: random.Random) -> str:
    return str(rng.randint(2, 99))
