"""Facts for the demo model: what can be stated, how it is asked for, how it is answered."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.demo_model.relations import CODE_RELATIONS, RELATIONS, WEIGHTS, Relation, Slots
from tools.demo_model.values import World, natural_value, strong_value

_ASK_NOUN = [
    "What is {}?",
    "What is {}?",
    "what is {}",
    "What's {}?",
    "what's {}?",
    "What was {}?",
    "What was {} again?",
    "Tell me {}.",
    "Please tell me {}.",
    "Can you tell me {}?",
    "I forgot {}.",
    "Remind me of {}.",
    "{}?",
    "And {}?",
    "Give me {}.",
    "So what is {}?",
    "Now, what is {}?",
    "Question: what is {}?",
    "What is {} please?",
    "whats {}",
    "Could you remind me what {} is?",
    "Do you remember {}?",
    "Do you know {}?",
    "I need {}.",
]
_ASK_ABOUT = [
    "Do you remember {}?",
    "Do you know {}?",
    "Tell me {}.",
    "Can you tell me {}?",
    "I forgot {}.",
    "Remember {}?",
    "Do you still know {}?",
]


@dataclass(frozen=True)
class Fact:
    """One stated fact."""

    relation: Relation
    slots: Slots
    value: str

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies it in a conversation: no two facts share it."""
        slots = (value.lower().replace("our", "or") for value in self.slots.values())
        return (self.relation.name, *slots)


def _article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def upper_first(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


def _fill(template: str, slots: Slots, value: str = "") -> str:
    key = slots.get("k", "")
    yours = "your " + key[3:] if key.startswith("my ") else key
    return template.format(
        v=value, k=key, K=upper_first(key), y=yours, ak=_article(key or "x"), a=slots.get("a", "")
    )


def draw_fact(world: World, *, strong: bool = False) -> Fact:
    """A random fact; a `strong` one has a value that cannot be guessed."""
    rng = world.rng
    if strong:
        relation = rng.choice(CODE_RELATIONS)
        return Fact(relation, relation.slots(world), strong_value(rng))
    relation = rng.choices(RELATIONS, WEIGHTS)[0]
    slots = relation.slots(world)
    if relation.value is not None:
        value = relation.value(rng)
    elif rng.random() < 0.55:
        value = strong_value(rng)
    else:
        value = natural_value(slots["a"], rng)
    return Fact(relation, slots, value)


def statement(fact: Fact, rng: random.Random) -> str:
    """A sentence that states the fact."""
    return _fill(rng.choice(fact.relation.statements), fact.slots, fact.value)


def question(fact: Fact, rng: random.Random) -> str:
    """A question that asks for the fact."""
    relation, slots = fact.relation, fact.slots
    if "a" in slots and rng.random() < 0.2:  # the other spelling
        other = slots["a"].replace("favourite", "favorite").replace("colour", "color")
        if other == slots["a"]:
            other = other.replace("favorite", "favourite").replace("color", "colour")
        slots = slots | {"a": other}
    choice = rng.random()
    if relation.nouns and choice < 0.7:
        noun = _fill(rng.choice(relation.nouns), slots)
        return upper_first(rng.choice(_ASK_NOUN).format(noun))
    if relation.questions and choice < 0.92:
        return upper_first(_fill(rng.choice(relation.questions), slots))
    about = _fill(relation.about, slots)
    for mine, yours in (
        ("your ", "my "),
        ("you are", "I am"),
        ("you were", "I was"),
        ("you ", "I "),
    ):
        about = about.replace(mine, yours)
    return rng.choice(_ASK_ABOUT).format(about)


def answer(fact: Fact) -> str:
    """The one right answer."""
    return upper_first(_fill(fact.relation.core, fact.slots, fact.value)) + "."


def unknown(fact: Fact) -> str:
    """The answer when the fact was never stated."""
    return f"I do not know {_fill(fact.relation.about, fact.slots)}. You have not told me."


def noted(fact: Fact) -> str:
    """The reply to a turn that states this one fact."""
    return f"Noted: {_fill(fact.relation.core, fact.slots, fact.value)}."
