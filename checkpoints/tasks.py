"""Tasks with answers that can be checked exactly, made by code.

A prompt is held out by its hash, so what a model is trained on and what it is tested on are
disjoint however many items are drawn.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from string import ascii_lowercase
from typing import NamedTuple

HELD_OUT_ONE_IN = 8
HELD_OUT_SEED = 2024


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "Ann Ben Bob Cal Cid Dan Deb Don Eva Eve Fay Fin Gil Gus Guy Hal Hank Ida Ivy Jan Jed Jim Jon "
    "Kai Kim Lea Lee Leo Liz Lou Mae Max May Meg Mia Ned Nia Oda Pam Pat Paul Quin Ray Rex Roy "
    "Sam Sid Sue Ted Tim Tom Una Val Vic Wes Will Xan Yan Zac Zoe"
)
RELATIONS = {
    "likes": words("red blue green black white pink gray gold teal brown"),
    "eats": words("rice bread fish soup corn beans eggs cake plums nuts"),
    "plays": words("chess golf cards drums tennis darts flute piano poker rugby"),
    "keeps": words("cats dogs goats hens bees ducks pigs sheep mice birds"),
    "visits": words("Rome Paris Oslo Cairo Lima Delhi Tokyo Bern Quito Malta"),
    "wears": words("hats boots rings scarves gloves caps belts shirts jeans ties"),
}
QUESTIONS = {
    "likes": "Which color does {} like?",
    "eats": "What does {} eat?",
    "plays": "What does {} play?",
    "keeps": "What does {} keep?",
    "visits": "Where does {} go?",
    "wears": "What does {} wear?",
}
VALUES = [value for values in RELATIONS.values() for value in values]
SENTENCE_WORDS = words("the cat sat on a mat and saw two big birds near our old house by night")
GOODS = words("apples coins books cards")
CALENDAR = {
    "days": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months": words(
        "January February March April May June July August September October November December"
    ),
}

Pair = tuple[str, str]


def add(rng: Random) -> Pair:
    a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
    width = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}")):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"Add {a} and {b}.", f"{'; '.join(steps)}. The sum is {a + b}."


def subtract(rng: Random) -> Pair:
    b, a = sorted(rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
    width = len(str(a))
    steps, borrow = [], 0
    for x, y in zip(reversed(str(a)), reversed(f"{b:0{width}}")):
        rest = int(x) - int(y) - borrow
        steps.append(f"{x}-{y}{'-1' if borrow else ''}={rest}")
        borrow = int(rest < 0)
    return f"Subtract {b} from {a}.", f"{'; '.join(steps)}. The difference is {a - b}."


def sort(rng: Random) -> Pair:
    return _sorting([rng.randrange(100) for _ in range(rng.randint(3, 10))])


def long_sort(rng: Random) -> Pair:
    return _sorting([rng.randrange(10, 100) for _ in range(rng.randint(12, 20))])


def _sorting(numbers: list[int]) -> Pair:
    return f"Sort these numbers: {_listed(numbers)}.", _listed(sorted(numbers))


def reverse(rng: Random) -> Pair:
    letters = rng.choices(ascii_lowercase, k=rng.randint(3, 16))
    return f"Reverse the letters {' '.join(letters)}.", " ".join(reversed(letters))


def repeat(rng: Random) -> Pair:
    return _repeating(rng.choices(SENTENCE_WORDS, k=rng.randint(3, 12)))


def long_repeat(rng: Random) -> Pair:
    return _repeating(rng.choices(SENTENCE_WORDS + VALUES + NAMES, k=rng.randint(20, 140)))


def _repeating(chosen: list[str]) -> Pair:
    text = " ".join(chosen)
    return f"Repeat: {text}", text


def story(rng: Random) -> Pair:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    start, change = rng.randint(2, 60), rng.randint(1, 60)
    if rng.random() < 0.5:
        end, sign, event = start + change, "+", f"gets {change} more"
    else:
        start, end, sign, event = start + change, start, "-", f"gives away {change}"
    return (
        f"{name} has {start} {goods} and {event}. How many {goods} now?",
        f"{start} {sign} {change} = {end}. {name} has {end} {goods}.",
    )


def facts(rng: Random) -> Pair:
    return _asking(rng, rng.randint(4, 40))


def long_facts(rng: Random) -> Pair:
    return _asking(rng, rng.randint(80, len(NAMES) * len(RELATIONS)))


def _asking(rng: Random, count: int) -> Pair:
    """One to four questions about `count` facts."""
    keys = [(name, verb) for name in NAMES for verb in RELATIONS]
    table = {key: rng.choice(RELATIONS[key[1]]) for key in rng.sample(keys, count)}
    asked = rng.sample(list(table), rng.randint(1, 4))
    lines = [f"{name} {verb} {value}." for (name, verb), value in table.items()]
    lines += [QUESTIONS[verb].format(name) for name, verb in asked]
    return " ".join(lines), " ".join(f"{key[0]} {key[1]} {table[key]}." for key in asked)


def count(rng: Random) -> Pair:
    if rng.random() < 0.3:
        return _calendar(rng)
    low = rng.randrange(10 ** rng.randint(1, 3))
    high = low + rng.randint(2, 24)
    numbers = list(range(low, high + 1))
    if rng.random() < 0.5:
        return f"Count from {low} to {high}.", _listed(numbers)
    return f"Count down from {high} to {low}.", _listed(numbers[::-1])


def _calendar(rng: Random) -> Pair:
    unit, names = rng.choice(list(CALENDAR.items()))
    first, length = rng.randrange(len(names)), rng.randint(2, 24)
    listed = [f"{n + 1} {names[(first + n) % len(names)]}" for n in range(length)]
    return f"Name {length} {unit} from {names[first]}.", _listed(listed)


def multiply(rng: Random) -> Pair:
    a, b = rng.randint(10, 999), rng.randint(2, 9)
    return f"Multiply {a} by {b}.", f"{a} * {b} = {a * b}."


def totals(rng: Random) -> Pair:
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(4, 12))]
    return f"Give the running totals of {_listed(numbers)}.", _listed(list(accumulate(numbers)))


def shuffle(rng: Random) -> Pair:
    letters = rng.sample(ascii_lowercase, rng.randint(4, 9))
    answer = " ".join(rng.sample(letters, len(letters)))
    return f"Shuffle the letters {' '.join(letters)}.", answer


def is_shuffled(prompt: str, text: str) -> bool:
    letters = re.findall(r"\b[a-z]\b", prompt)
    return Counter(text.split(" ")) == Counter(letters)


def choose(rng: Random) -> Pair:
    offered = rng.sample(VALUES, rng.randint(4, 10))
    size = rng.randint(2, 4)
    chosen = _listed(rng.sample(offered, size))
    return (
        f"Choose {size} words and write them twice: {_listed(offered)}.",
        f"Once: {chosen}. Twice: {chosen}.",
    )


def is_chosen(prompt: str, text: str) -> bool:
    asked = re.fullmatch(r"Choose (\d+) words and write them twice: (.*)\.", prompt)
    given = re.fullmatch(r"Once: (.*)\. Twice: (.*)\.", text)
    if asked is None or given is None or given[1] != given[2]:
        return False
    chosen = given[1].split(", ")
    distinct = len(set(chosen)) == len(chosen) == int(asked[1])
    return distinct and set(chosen) <= set(asked[2].split(", "))


def _listed(values: list[int] | list[str]) -> str:
    return ", ".join(map(str, values))


class Task(NamedTuple):
    make: Callable[[Random], Pair]
    hard: bool = False
    """Committing many tokens in one forward costs accuracy."""
    check: Callable[[str, str], bool] | None = None
    """Judges (prompt, response) where more than one answer is right."""


TASKS = {
    "add": Task(add),
    "subtract": Task(subtract),
    "story": Task(story),
    "sort": Task(sort),
    "reverse": Task(reverse),
    "repeat": Task(repeat),
    "long_repeat": Task(long_repeat),
    "count": Task(count),
    "facts": Task(facts),
    "long_facts": Task(long_facts),
    "multiply": Task(multiply, hard=True),
    "totals": Task(totals, hard=True),
    "long_sort": Task(long_sort, hard=True),
    "shuffle": Task(shuffle, hard=True, check=is_shuffled),
    "choose": Task(choose, hard=True, check=is_chosen),
}


@dataclass(frozen=True, slots=True)
class Item:
    task: str
    prompt: str
    answer: str
    """The right answer, or one of them."""

    def is_correct(self, text: str) -> bool:
        check = TASKS[self.task].check
        return check(self.prompt, text) if check else text == self.answer


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def generate(rng: Random, task: str) -> Item:
    """A new item to train on; its prompt is none of the held-out ones."""
    return _draw(rng, task, held_out=False)


def held_out_items(task: str, count: int = 500) -> list[Item]:
    """The first `count` held-out items of a fixed sequence, each with a prompt of its own."""
    rng = Random(f"{HELD_OUT_SEED} {task}")
    items: dict[str, Item] = {}
    while len(items) < count:
        item = _draw(rng, task, held_out=True)
        items.setdefault(item.prompt, item)
    return list(items.values())


def _draw(rng: Random, task: str, *, held_out: bool) -> Item:
    while True:
        prompt, answer = TASKS[task].make(rng)
        if is_held_out(prompt) == held_out:
            return Item(task, prompt, answer)
