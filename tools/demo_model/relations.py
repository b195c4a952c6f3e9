"""The kinds of facts that the demo model knows: how they are stated, asked for and answered.

In the templates: {k} key, {K} the same with a capital, {ak} with an article, {y} seen from the
other side ("my lamp" becomes "your lamp"), {a} attribute, {v} value.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import values as values
from tools.demo_model import words as w
from tools.demo_model.values import World

Slots = dict[str, str]
Value = Callable[[random.Random], str]


@dataclass(frozen=True)
class Relation:
    """One kind of fact."""

    name: str
    weight: float
    slots: Callable[[World], Slots]
    value: Value | None  # None: a value that suits the attribute
    core: str  # how the answer puts it; ends with the value
    about: str  # what is asked for, as in "do you know ..."
    statements: tuple[str, ...]
    nouns: tuple[str, ...] = ()  # for "what is ...?"
    questions: tuple[str, ...] = ()


def _relation(
    name: str,
    weight: float,
    slots: Callable[[World], Slots],
    value: Value | None,
    core: str,
    about: str,
    statements: str,
    *,
    nouns: str = "",
    questions: str = "",
) -> Relation:
    """A relation whose alternatives are separated by bars."""
    split = (tuple(text.split("|")) if text else () for text in (statements, nouns, questions))
    return Relation(name, weight, slots, value, core, about, *split)


# verb, question about somebody, the same after "do you know"
_VERBS = (
    ("works at", "Where does {k} work?", "where {k} works"),
    ("works for", "Who does {k} work for?", "who {k} works for"),
    ("plays", "What does {k} play?", "what {k} plays"),
    ("speaks", "Which language does {k} speak?", "which language {k} speaks"),
    ("drives", "What does {k} drive?", "what {k} drives"),
    ("hates", "What does {k} hate?", "what {k} hates"),
    ("studies", "What does {k} study?", "what {k} studies"),
    ("wants", "What does {k} want?", "what {k} wants"),
    ("is married to", "Who is {k} married to?", "who {k} is married to"),
    ("was born in", "Where was {k} born?", "where {k} was born"),
    ("bought", "What did {k} buy?", "what {k} bought"),
    ("found", "What did {k} find?", "what {k} found"),
)


def _verb_relations() -> tuple[Relation, ...]:
    found = []
    for verb, asked, about in _VERBS:
        said = f"{{k}} {verb} {{v}}"
        found.append(
            _relation(
                verb,
                0.12,
                lambda x: {"k": x.person()},
                values.anything,
                said,
                about,
                f"{said}.",
                questions=asked,
            )
        )
        # The same about the user: "I work at", "you work at".
        mine = verb.replace("is ", "am ").replace("studies", "study")
        first = mine.split()[0]
        if first.endswith("s") and first != "was":
            mine = mine.replace(first, first[:-1], 1)
        yours = mine.replace("am ", "are ").replace("was ", "were ")
        asked = asked.replace("does {k}", "do I").replace("did {k}", "did I")
        asked = asked.replace("is {k}", "am I").replace("was {k}", "was I")
        about = about.replace("{k}", "you", 1)
        about = about.replace(f"you {verb.split()[0]}", f"you {yours.split()[0]}")
        found.append(
            _relation(
                f"i {verb}",
                0.08,
                lambda x: {},
                values.anything,
                f"you {yours} {{v}}",
                about,
                f"I {mine} {{v}}.|i {mine} {{v}}",
                questions=asked,
            )
        )
    return tuple(found)


RELATIONS = (
    _relation(
        "thing",
        5.0,
        lambda x: {"k": x.thing(), "a": x.rng.choice(w.THING_ATTRIBUTES)},
        None,
        "the {a} of the {k} is {v}",
        "the {a} of the {k}",
        "The {a} of the {k} is {v}.|The {k}'s {a} is {v}.|The {k} has the {a} {v}.|"
        "The {a} for the {k} is {v}.|{K} {a}: {v}.|Remember that the {a} of the {k} is {v}.|"
        "{k} {a} = {v}|Note: the {k} {a} is {v}.|The {k}: its {a} is {v}.|"
        "The {a} of the {k} was set to {v}.|For the {k}, the {a} is {v}.",
        nouns="the {a} of the {k}|the {k}'s {a}|the {a} for the {k}|the {k} {a}",
        questions="Which {a} does the {k} have?|{k} {a}?|{a} of the {k}?",
    ),
    _relation(
        "person",
        3.5,
        lambda x: {"k": x.person(), "a": x.rng.choice(w.PERSON_ATTRIBUTES)},
        None,
        "{k}'s {a} is {v}",
        "{k}'s {a}",
        "{k}'s {a} is {v}.|The {a} of {k} is {v}.|{k} has the {a} {v}.|{k}, {a}: {v}.|"
        "The {a} for {k} is {v}.|{k} told me that the {a} is {v}.|Remember that {k}'s {a} is {v}.",
        nouns="{k}'s {a}|{k}'s {a}|the {a} of {k}|the {a} for {k}",
        questions="{k}'s {a}?|{a} of {k}?|Which {a} does {k} have?",
    ),
    _relation(
        "my",
        3.0,
        lambda x: {"a": x.rng.choice(w.MY_ATTRIBUTES)},
        None,
        "your {a} is {v}",
        "your {a}",
        "My {a} is {v}.|my {a} is {v}|Remember that my {a} is {v}.|My {a}: {v}.|"
        "By the way, my {a} is {v}.|I set my {a} to {v}.|Please remember: my {a} is {v}.|"
        "Note that my {a} is {v}.",
        nouns="my {a}",
        questions="my {a}?|{a}?|Which {a} do I have?|What {a} do I have?",
    ),
    _relation(
        "name",
        1.5,
        lambda x: {},
        values.name,
        "your name is {v}",
        "your name",
        "My name is {v}.|I am {v}.|I'm {v}.|Call me {v}.|You can call me {v}.|my name is {v}|"
        "im {v}|This is {v} speaking.|i am {v}|my name's {v}",
        nouns="my name|my name",
        questions="Who am I?|What am I called?|my name?|Do you know who I am?|who am i|"
        "Say my name.|How am I called?",
    ),
    _relation(
        "kin",
        1.2,
        lambda x: {"k": x.rng.choice((*w.KIN, *w.ANIMALS))},
        values.name,
        "your {k}'s name is {v}",
        "your {k}'s name",
        "My {k} is called {v}.|My {k}'s name is {v}.|My {k} is named {v}.|"
        "I have {ak} called {v}.|I have {ak} named {v}.|The name of my {k} is {v}.|"
        "my {k} is {v}",
        nouns="my {k}'s name|the name of my {k}",
        questions="What is my {k} called?|How is my {k} called?|Who is my {k}?|my {k}'s name?",
    ),
    _relation(
        "lone",
        2.0,
        lambda x: {"a": x.rng.choice(w.LONE_ATTRIBUTES)},
        None,
        "the {a} is {v}",
        "the {a}",
        "The {a} is {v}.|The {a}: {v}.|Remember that the {a} is {v}.|the {a} is {v}|"
        "Remember the {a}: {v}.|The {a} for today is {v}.|The {a} has changed to {v}.|"
        "Remember the {a} {v}.|remember the {a} {v}|Keep the {a} {v} in mind.",
        nouns="the {a}|the {a}|the {a} I told you|the {a} that I gave you",
        questions="the {a}?|{a}?|Which {a}?|What {a} did I tell you?|"
        "Which {a} did I ask you to remember?|What {a} did I ask you to remember?|"
        "Which {a} did I give you?",
    ),
    _relation(
        "lives",
        1.0,
        lambda x: {"k": x.person()},
        values.city,
        "{k} lives in {v}",
        "where {k} lives",
        "{k} lives in {v}.|{k} has a house in {v}.|{k} moved to {v}.|{k}'s home is in {v}.",
        questions="Where does {k} live?|Which city does {k} live in?|In which city does {k} live?",
    ),
    _relation(
        "i live",
        0.5,
        lambda x: {},
        values.city,
        "you live in {v}",
        "where you live",
        "I live in {v}.|i live in {v}|My home is in {v}.|I moved to {v}.",
        questions="Where do I live?|Which city do I live in?|where is my home?",
    ),
    _relation(
        "from",
        0.5,
        lambda x: {},
        values.city,
        "you are from {v}",
        "where you are from",
        "I am from {v}.|I come from {v}.|i'm from {v}",
        questions="Where am I from?|Where do I come from?",
    ),
    _relation(
        "job",
        0.8,
        lambda x: {"k": x.person()},
        values.job,
        "{k} works as {v}",
        "what {k} does for a living",
        "{k} works as {v}.|{k} is {v}.|{k} has a job as {v}.",
        nouns="{k}'s job",
        questions="What does {k} do?|What is {k}'s job?|What does {k} do for a living?",
    ),
    _relation(
        "my job",
        0.4,
        lambda x: {},
        values.job,
        "you work as {v}",
        "what you do for a living",
        "I work as {v}.|I am {v}.|i'm {v}|I earn my living as {v}.",
        questions="What do I do?|What do I work as?|What do I do for a living?",
    ),
    _relation(
        "likes",
        0.8,
        lambda x: {"k": x.person()},
        values.like,
        "{k} likes {v}",
        "what {k} likes",
        "{k} likes {v}.|{k} loves {v}.|{k} really likes {v}.",
        questions="What does {k} like?|What does {k} love?|what does {k} like most?",
    ),
    _relation(
        "i like",
        0.5,
        lambda x: {},
        values.like,
        "you like {v}",
        "what you like",
        "I like {v}.|I love {v}.|i like {v}|I really like {v}.",
        questions="What do I like?|What do I love?|what do i like",
    ),
    _relation(
        "place",
        1.5,
        lambda x: {"k": f"{x.rng.choice(('the', 'the', 'my'))} {x.thing()}"},
        values.place,
        "{y} is {v}",
        "where {y} is",
        "{K} is {v}.|I put {k} {v}.|I left {k} {v}.|You can find {k} {v}.|We hid {k} {v}.|"
        "I parked {k} {v}.|{k} is {v}|{K} can be found {v}.",
        questions="Where is {k}?|where's {k}?|Where can I find {k}?|Where did I put {k}?",
    ),
    _relation(
        "time",
        1.2,
        lambda x: {"k": x.event()},
        values.time,
        "the {k} is {v}",
        "when the {k} is",
        "The {k} is {v}.|The {k} starts {v}.|The {k} begins {v}.|the {k} is {v}|"
        "I have {ak} {v}.|We have {ak} {v}.|My {k} is {v}.",
        nouns="the time of the {k}",
        questions="When is the {k}?|What time is the {k}?|When does the {k} start?|When is my {k}?",
    ),
    _relation(
        "age",
        0.4,
        lambda x: {"k": x.person()},
        values.age,
        "{k} is {v}",
        "how old {k} is",
        "{k} is {v}.|{k} turned {v}.|{k} is now {v}.",
        questions="How old is {k}?|What age is {k}?",
    ),
    _relation(
        "my age",
        0.4,
        lambda x: {},
        values.age,
        "you are {v}",
        "how old you are",
        "I am {v}.|I'm {v}.|i am {v}",
        questions="How old am I?|how old am i",
    ),
    _relation(
        "have",
        0.5,
        lambda x: {"k": x.plural()},
        lambda rng: str(rng.randint(2, 99)),
        "you have {v} {k}",
        "how many {k} you have",
        "I have {v} {k}.|I own {v} {k}.|i have {v} {k}",
        questions="How many {k} do I have?|how many {k} have I got?",
    ),
    *_verb_relations(),
    _relation(
        "price",
        0.7,
        lambda x: {"k": x.thing()},
        values.price,
        "the {k} costs {v}",
        "what the {k} costs",
        "The {k} costs {v}.|The price of the {k} is {v}.|You can buy the {k} for {v}.",
        nouns="the price of the {k}",
        questions="How much is the {k}?|What does the {k} cost?",
    ),
    _relation(
        "owner",
        0.7,
        lambda x: {"k": x.thing()},
        values.name,
        "the {k} belongs to {v}",
        "who owns the {k}",
        "The {k} belongs to {v}.|The owner of the {k} is {v}.|I gave the {k} to {v}.",
        nouns="the owner of the {k}",
        questions="Who owns the {k}?|Who has the {k}?|Whose is the {k}?",
    ),
)
WEIGHTS = [relation.weight for relation in RELATIONS]
# The ones whose values can be anything: recall is measured on them.
CODE_RELATIONS = tuple(r for r in RELATIONS if r.name in ("thing", "person", "my", "lone"))
