"""Conversations for the demo model: facts, filler, questions, small talk, in many shapes."""

import random
from dataclasses import dataclass, field

from tools.demo_model import skills
from tools.demo_model import words as w
from tools.demo_model.facts import (
    Fact,
    answer,
    draw_fact,
    noted,
    question,
    statement,
    unknown,
    upper_first,
)

Message = tuple[str, str]  # role, content
NOTED = "Noted. I will remember that."


@dataclass
class Chat:
    """A conversation under construction; `budget` is its wanted length in characters."""

    rng: random.Random
    budget: int
    messages: list[Message] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        # Few words make facts easy to confuse.
        self.words = w.WORDS | {
            name: self.rng.sample(w.WORDS[name], self.rng.randint(3, len(w.WORDS[name])))
            for name in ("ADJECTIVES", "THINGS", "NAMES")
        }
        self.facts: dict[tuple[str, ...], Fact] = {}
        self.filler = self.rng.choice((0.0, 0.0, 0.15, 0.5, 0.8))
        self.strong = self.rng.random() < 0.3
        self.case = self.rng.choices((None, str.lower, str.upper), (0.83, 0.12, 0.05))[0]

    def say(self, role: str, text: str) -> None:
        if self.case and role != "assistant":
            text = self.case(text)
        self.messages.append((role, text))
        self.size += len(text) + 4

    def new_fact(self) -> Fact:
        """A fact whose key is new to this conversation (now and then: one with a new value)."""
        while True:
            fact = draw_fact(self.rng, self.words, strong=self.strong)
            if self.case:
                # Answers name the key in its usual case or in lower case, the value as stated.
                lower = self.case is str.lower
                slots = {key: text.lower() if lower else text for key, text in fact.slots.items()}
                fact = Fact(fact.relation, slots, self.case(fact.value))
            if fact.key not in self.facts:
                return fact

    def learn(self, fact: Fact) -> str:
        self.facts[fact.key] = fact
        text = statement(fact, self.rng)
        if self.rng.random() < 0.02:
            text = w.fill(self.rng, "Remember this: |Remember: |Can you remember this: ") + text
        return text

    def block(self, size: int) -> str:
        """A text of about `size` characters: facts, and filler between them."""
        rng = self.rng
        style = rng.random()
        separator = " " if style < 0.6 else "\n"
        bullet = rng.choice(("- ", "* ")) if style > 0.8 else ""
        parts, length = [], 0
        if rng.random() < 0.4:
            parts.append(rng.choice(w.TABLES["intros"]))
        while length < size:
            if rng.random() < self.filler:
                part = bullet + filler(rng)
            else:
                part = bullet + self.learn(self.new_fact())
                if separator == " " and part[-1] not in ".!?:":
                    part = upper_first(part) + "."
            parts.append(part)
            length += len(part) + 1
        return separator.join(parts)

    def ask(self) -> tuple[str, str]:
        """A question about a stated fact (rarely an unstated one), and its answer."""
        rng = self.rng
        if not self.facts or rng.random() < 0.05:
            fact = self.new_fact()
            text, reply = question(fact, rng), unknown(fact)
        else:
            fact = rng.choice(tuple(self.facts.values()))
            text, reply = question(fact, rng), answer(fact)
        change = rng.choices(
            (str, str.lower, str.upper, lambda text: text.lower().rstrip("?.")),
            (0.77, 0.12, 0.03, 0.08),
        )[0]
        return change(text), reply

    def turn(self, text: str, reply: str) -> None:
        """Append a user turn and the reply to it."""
        self.say("user", text)
        self.say("assistant", reply)

    def tell(self) -> None:
        """A turn that states facts, or the new value of one: the latest counts."""
        rng = self.rng
        choice = rng.random()
        if choice < 0.08 and self.facts:
            old = rng.choice(tuple(self.facts.values()))
            value = old.relation.draw_value(rng, old.slots)
            fact = Fact(old.relation, old.slots, self.case(value) if self.case else value)
            self.turn(rng.choice(w.TABLES["changes"]) + self.learn(fact), noted(fact))
        elif choice < 0.7:
            fact = self.new_fact()
            self.turn(*self.greeted(self.learn(fact), noted(fact)))
        else:
            texts = [self.learn(self.new_fact()) for _ in range(rng.choice((2, 2, 2, 3, 4, 5, 6)))]
            if len(texts) == 2:
                text = texts[0].rstrip(".") + rng.choice((" and ", ", and ", ", ")) + texts[1]
            else:
                text = rng.choice((" ", "\n")).join(texts)
            if rng.random() < 0.15:
                asked, reply = self.ask()
                self.turn(f"{text} {asked}", reply)
            else:
                self.turn(*self.greeted(text, NOTED))

    def greeted(self, text: str, reply: str) -> tuple[str, str]:
        """Now and then with a greeting, which the reply returns."""
        if self.rng.random() > 0.2:
            return text, reply
        return self.rng.choice(w.TABLES["greetings"]) + text, f"Hello! {reply}"

    def chat_turn(self) -> None:
        """A random turn of a free conversation."""
        choice = self.rng.random()
        if choice < 0.33:
            self.tell()
        elif choice < 0.85:
            self.turn(*self.ask())
        else:
            self.turn(*other(self.rng))


def filler(rng: random.Random) -> str:
    """A sentence that states nothing worth asking for."""
    choice = rng.random()
    if choice < 0.6:
        return rng.choice(w.english())
    if choice < 0.75:
        words = " ".join(w.any_word(rng) for _ in range(rng.randint(3, 10)))
        return upper_first(words) + "."
    return w.fill(rng, rng.choice(w.TABLES["stories"]))


def other(rng: random.Random) -> tuple[str, str]:
    choice = rng.random()
    if choice < 0.35:
        return skills.small_talk(rng)
    return skills.skill(rng) if choice < 0.8 else skills.nonsense(rng)


def document_chat(rng: random.Random, budget: int) -> list[Message]:
    """First the facts, in one to four messages, then questions to the end."""
    chat = Chat(rng, budget)
    wanted = int(budget * rng.uniform(0.2, 0.85))
    where = rng.random()
    if where < 0.35:
        chat.say("system", chat.block(wanted))
    else:
        if rng.random() < 0.5:
            chat.say("system", rng.choice(w.TABLES["systems"]))
        pieces = rng.choice((1, 1, 2, 3, 4)) if where < 0.8 else max(1, wanted // 300)
        for _ in range(pieces - 1):
            chat.turn(chat.block(wanted // pieces), NOTED)
        text = chat.block(wanted // pieces)
        if rng.random() < 0.5:
            asked, reply = chat.ask()
            chat.turn(text + rng.choice((" ", "\n", "\n\n", "\n\nQuestion: ")) + asked, reply)
        else:
            chat.turn(text, NOTED)
    while chat.size < budget:
        if rng.random() < 0.93:
            chat.turn(*chat.ask())
        else:
            chat.chat_turn()
    return chat.messages


def free_chat(rng: random.Random, budget: int) -> list[Message]:
    """Facts, questions and small talk in any order."""
    chat = Chat(rng, budget)
    choice = rng.random()
    if choice < 0.3:
        chat.say("system", rng.choice(w.TABLES["systems"]))
    elif choice < 0.5:
        chat.say("system", chat.block(int(budget * rng.uniform(0.05, 0.4))))
    while chat.size < budget:
        chat.chat_turn()
    return chat.messages


def skill_chat(rng: random.Random, budget: int) -> list[Message]:
    chat = Chat(rng, budget)
    if rng.random() < 0.3:
        chat.say("system", rng.choice(w.TABLES["systems"]))
    while chat.size < budget:
        chat.turn(*other(rng))
    return chat.messages


def draw_chat(rng: random.Random, budget: int) -> list[Message]:
    """A random conversation of about `budget` characters."""
    choice = rng.random()
    if budget < 1500 and choice < 0.35:
        return skill_chat(rng, budget)
    return (document_chat if choice < 0.72 else free_chat)(rng, budget)
