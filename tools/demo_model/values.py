"""Keys and values of the demo model's facts."""

import random

from tools.demo_model import words as w


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
        if choice < 0.08:
            return rng.choice((w.pseudo_word, w.any_word))(rng)
        noun = rng.choice(self.things)
        if choice < 0.2:
            return noun
        if choice < 0.25:
            return f"{rng.choice(self.adjectives)} {w.any_word(rng)}"
        return f"{rng.choice(self.adjectives)} {noun}"

    def some_thing(self) -> str:
        """A thing, with what goes before it."""
        return f"{self.rng.choice(('the', 'the', 'my'))} {self.thing()}"

    def kin(self) -> str:
        return self.rng.choice((*w.KIN, *w.ANIMALS))

    def person(self) -> str:
        """A name such as "Ada"; now and then a made-up one."""
        choice = self.rng.random()
        if choice < 0.15:
            if choice < 0.05:
                kind = self.rng.choice(w.GROUPS)
                return f"{kind} {w.any_word(self.rng).capitalize()}"
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


def _odd(rng: random.Random) -> str:
    if rng.random() < 0.3:
        letters = "abcdefghijklmnopqrstuvwxyz"
        pool = letters * 3 + letters.upper() + "0123456789" * 2
        return "".join(rng.choice(pool) for _ in range(rng.randint(2, 7)))
    parts = []
    for _ in range(rng.choice((2, 2, 3))):
        choice = rng.random()
        if choice < 0.5:
            parts.append(w.any_word(rng))
        elif choice < 0.75:
            parts.append(w.digits(rng, 1, 4))
        else:
            parts.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(2)))
    return rng.choice(("-", "-", "_", ".", "", "/")).join(parts)


def any_value(rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.5:
        return strong_value(rng)
    if choice < 0.6:
        return w.digits(rng, 1, 7)
    if choice < 0.68:
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        token = letters + rng.choice(("-", "")) + w.digits(rng, 1, 4)
        return token if rng.random() < 0.6 else w.any_word(rng) + w.digits(rng, 1, 3)
    if choice < 0.8:
        return rng.choice((w.pseudo_word(rng), w.pseudo_word(rng).capitalize()))
    if choice < 0.86:
        return _odd(rng)
    if choice < 0.89:
        return f"the {rng.choice(w.ADJECTIVES)} {w.any_word(rng)}"
    return w.any_word(rng) if choice < 0.95 else rng.choice(w.NAMES)


def natural_value(attribute: str, rng: random.Random) -> str:
    """A value that suits an attribute (mostly)."""
    if rng.random() < 0.3:
        return any_value(rng)

    def has(*parts: str) -> bool:
        return any(part in attribute for part in parts)

    if has("colo"):
        return rng.choice(w.COLOURS)
    if has("favourite number", "lucky", "favorite number", "age", "seat", "room", "weight"):
        return w.digits(rng, 1, 3)
    if has("name", "owner", "king", "queen", "president", "mayor", "founder"):
        return rng.choice((*w.NAMES, *w.SURNAMES, w.pseudo_word(rng).capitalize()))
    if has("code", "number", "pin", "key", "budget", "card"):
        return w.digits(rng, 4, 4) if rng.random() < 0.6 else w.digits(rng, 2, 8)
    if has("shopping"):
        return ", ".join(rng.sample(w.FOODS, rng.randint(2, 4)))
    if has("city", "capital", "town"):
        return rng.choice(w.CITIES)
    if has("food"):
        return rng.choice(w.FOODS)
    if has("animal", "mascot"):
        return rng.choice(w.ANIMALS)
    if has("birthday", "deadline"):
        day, month = rng.randint(1, 31), rng.choice(w.MONTHS)
        return rng.choice((f"{day} {month}", f"{month} {day}", f"the {day}th of {month}"))
    if has("email"):
        return f"{rng.choice((w.any_word(rng), rng.choice(w.NAMES).lower()))}@{w.any_word(rng)}.com"
    return any_value(rng)


def place(rng: random.Random) -> str:
    where = rng.choice(("in", "in", "under", "behind", "on", "near", "at", "next to"))
    choice = rng.random()
    if choice < 0.12:
        return f"{rng.choice(('on level', 'on floor', 'in row', 'in room'))} {rng.randint(1, 99)}"
    if choice < 0.2:
        return f"{where} {rng.choice((rng.choice(w.CITIES), w.any_word(rng)))}"
    if choice < 0.3:
        return f"{where} my {w.any_word(rng)}".replace(" my ", " the ")
    adjective = f"{rng.choice(w.ADJECTIVES)} " if choice < 0.65 else ""
    return f"{where} the {adjective}{rng.choice(w.PLACES)}"


def job(rng: random.Random) -> str:
    job = rng.choice(w.JOBS)
    return f"{'an' if job[0] in 'aeiou' else 'a'} {job}"


def city(rng: random.Random) -> str:
    return rng.choice(w.CITIES) if rng.random() < 0.8 else w.pseudo_word(rng).capitalize()


def like(rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.6:
        return rng.choice(w.FOODS)
    food = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.FOODS)}"
    return rng.choice((food, f"{rng.choice(w.ANIMALS)}s", w.any_word(rng)))


def time(rng: random.Random) -> str:
    hour = f"at {rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    choice = rng.random()
    if choice < 0.5:
        return hour
    if choice < 0.7:
        return f"at {rng.randint(1, 12)} {rng.choice(('pm', 'am', 'o clock'))}"
    day = rng.choice(("tomorrow", "today", f"on {rng.choice(w.DAYS)}"))
    if choice < 0.8:
        day = f"on {rng.randint(1, 31)} {rng.choice(w.MONTHS)}"
    return day if rng.random() < 0.5 else f"{day} {hour}"


def price(rng: random.Random) -> str:
    return f"{rng.randint(2, 9999)} {rng.choice(('coins', 'dollars', 'euros'))}"


def name(rng: random.Random) -> str:
    choice = rng.random()
    if choice < 0.2:
        return w.pseudo_word(rng).capitalize()
    return rng.choice(w.NAMES) + (f" {rng.choice(w.SURNAMES)}" if choice < 0.3 else "")


def age(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} years old"


def anything(rng: random.Random) -> str:
    return name(rng) if rng.random() < 0.3 else any_value(rng)


def count(rng: random.Random) -> str:
    return str(rng.randint(2, 99))
