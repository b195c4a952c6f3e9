"""Facts for the demo model: what can be stated, how it is asked for, how it is answered.

The kinds of facts are `relations` of tables.json.  In their templates: {k} key, {K} the same with a
capital, {ak} with an article, {y} seen from the other side ("my lamp" becomes "your lamp"), {a}
attribute, {v} value.
"""

import random
import re
from dataclasses import dataclass

from tools.demo_model import words as w

Slots = dict[str, str]
Words = dict[str, list[str]]


@dataclass(frozen=True)
class Relation:
    """One kind of fact.

    slots: a template or a word list (words.py) for each slot.  value: a template; None: a value
    that suits the attribute.  core: the sentence of the answer, which ends with the value.
    about: the object of "do you know ...".  nouns: for "what is ...?".
    """

    name: str
    weight: float
    slots: Slots
    value: str | None
    core: str
    about: str
    statements: list[str]
    nouns: list[str] = ()
    questions: list[str] = ()

    def draw_slots(self, rng: random.Random, words: Words) -> Slots:
        return {slot: w.fill(rng, f"{{{kind}}}", words) for slot, kind in self.slots.items()}

    def draw_value(self, rng: random.Random, slots: Slots) -> str:
        if self.value is not None:
            return w.fill(rng, f"{{{self.value}}}")
        return w.fill(rng, "{strong}") if rng.random() < 0.55 else w.natural_value(rng, slots["a"])


RELATIONS = [Relation(**fields) for fields in w.TABLES["relations"]]
WEIGHTS = [relation.weight for relation in RELATIONS]
# Relations whose values can be anything; recall is measured on them.
CODE_RELATIONS = [r for r in RELATIONS if r.name in ("thing", "person", "my", "lone")]


@dataclass(frozen=True)
class Fact:
    """One stated fact."""

    relation: Relation
    slots: Slots
    value: str

    @property
    def key(self) -> tuple[str, ...]:
        """The key of this fact, unique in a conversation."""
        slots = (value.lower().replace("our", "or") for value in self.slots.values())
        return (self.relation.name, *slots)


def _article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fill(template: str, slots: Slots, value: str = "") -> str:
    key = slots.get("k", "")
    yours = "your " + key[3:] if key.startswith("my ") else key
    return template.format(
        v=value, k=key, K=upper_first(key), y=yours, ak=_article(key or "x"), a=slots.get("a", "")
    )


def draw_fact(rng: random.Random, words: Words, *, strong: bool = False) -> Fact:
    """A random fact about `words`; a `strong` one has a value that cannot be guessed."""
    relation = rng.choice(CODE_RELATIONS) if strong else rng.choices(RELATIONS, WEIGHTS)[0]
    slots = relation.draw_slots(rng, words)
    value = w.fill(rng, "{strong}") if strong else relation.draw_value(rng, slots)
    return Fact(relation, slots, value)


def statement(fact: Fact, rng: random.Random) -> str:
    return _fill(rng.choice(fact.relation.statements), fact.slots, fact.value)


def question(fact: Fact, rng: random.Random) -> str:
    """A question that asks for the fact."""
    relation, slots = fact.relation, fact.slots
    if "a" in slots and rng.random() < 0.2:  # the other spelling
        slots = slots | {"a": re.sub("(?<=[a-z])our", "or", slots["a"])}
    choice = rng.random()
    if relation.nouns and choice < 0.7:
        noun = _fill(rng.choice(relation.nouns), slots)
        return upper_first(rng.choice(w.TABLES["ask_noun"]).format(noun))
    if relation.questions and choice < 0.92:
        return upper_first(_fill(rng.choice(relation.questions), slots))
    about = _fill(relation.about, slots)
    for yours, mine in ("your ", "my "), ("you are", "I am"), ("you were", "I was"), ("you ", "I "):
        about = about.replace(yours, mine)
    return rng.choice(w.TABLES["ask_about"]).format(about)


def answer(fact: Fact) -> str:
    return upper_first(_fill(fact.relation.core, fact.slots, fact.value)) + "."


def unknown(fact: Fact) -> str:
    """The answer when the fact was never stated."""
    return f"I do not know {_fill(fact.relation.about, fact.slots)}. You have not told me."


def noted(fact: Fact) -> str:
    """The reply to a turn that states this one fact."""
    return f"Noted: {_fill(fact.relation.core, fact.slots, fact.value)}."
