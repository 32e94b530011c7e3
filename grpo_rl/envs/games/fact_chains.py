"""Questions over made-up facts that take several look-ups: the author of a book, the town of birth, the land of a town."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction
from grpo_rl.data.tasks.made_rows import LazyRows, Row, row_of, split_of_text
from grpo_rl.envs.games.game import Message, Play, Wording, refuse

NAME = "fact_chains"
WORLD_SEED = 0
"""The facts are the same for every seed of the questions."""
NUM_PEOPLE, NUM_TOWNS, NUM_LANDS = 120, 40, 12
SYLLABLES = "ba dor el fen gar hil ka lun mar nor ol pra ris sel tor ul ven wyn yar zim".split()  # noqa: SIM905
TRADES = ("baker", "carpenter", "doctor", "gardener", "glassblower", "judge", "miller", "painter", "sailor", "teacher")
THINGS = ("bridge", "garden", "harbour", "lantern", "letter", "mirror", "mountain", "river", "road", "storm", "tower", "winter")
QUALITIES = ("broken", "distant", "empty", "golden", "hidden", "last", "quiet", "red", "silver", "sleeping", "white", "wild")


@dataclass(frozen=True, slots=True)
class Person:
    """A person of the made-up world: each name and each book is that of one person only."""

    name: str
    book: str
    trade: str
    town: str
    teacher: str
    """The name of the person that taught this one."""

    def text(self, verb: str) -> str:
        """Return the name of the text about how the person was `born`, was `taught` or `wrote`; its words find it, too."""
        return f"{self.name} {verb}"


@dataclass(frozen=True, slots=True)
class World:
    """All facts."""

    people: tuple[Person, ...]
    lands: dict[str, str]
    """The land that each town lies in."""

    def texts(self) -> dict[str, str]:
        """Return the facts as short texts by name, three for each person and one for each town: what a retrieval tool searches.

        A person's name is twice in the person's own texts, so that these rank before those that only mention it. The fact comes
        last: a network of two layers learns to copy from a place that is always as far away, and hardly from any other.
        """
        found = {}
        for person in self.people:
            first = f"{person.name} is a {person.trade}. {person.name}"
            found[person.text("born")] = f"{first} was born in {person.town}."
            found[person.text("taught")] = f"{first} was taught by {person.teacher}."
            found[person.text("wrote")] = f'{first} wrote the book "{person.book}".'
        for town, land in self.lands.items():
            found[town] = f"{town} is a town in {land}."
        return found


@lru_cache(maxsize=64)
def world(number: int = 0) -> World:
    """Return one of the made-up worlds, each with names of its own; the same on every machine. The tool `search` has the first."""
    rng = random.Random(f"{NAME}:world:{WORLD_SEED + number}")
    found: dict[str, None] = {}
    while len(found) < NUM_PEOPLE * 2 + NUM_TOWNS + NUM_LANDS:
        found["".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).title()] = None
    names = list(found)
    lands, towns, words = names[:NUM_LANDS], names[NUM_LANDS : NUM_LANDS + NUM_TOWNS], names[NUM_LANDS + NUM_TOWNS :]
    full = [f"{first} {last}" for first, last in zip(words[::2], words[1::2], strict=True)]
    books = [f"The {quality.title()} {thing.title()}" for quality in QUALITIES for thing in THINGS]
    rng.shuffle(books)
    people = (
        Person(name, book, rng.choice(TRADES), rng.choice(towns), teacher)
        for name, book, teacher in zip(full, books, [*full[1:], full[0]], strict=False)
    )
    return World(tuple(people), {town: rng.choice(lands) for town in towns})


@dataclass(frozen=True, slots=True)
class Chain:
    """A question with the look-ups that lead to its answer."""

    question: str
    short: str
    """The question in few characters, for a small model."""
    look_ups: tuple[tuple[str, str], ...]
    """The words of each look-up, and the name of the text that has its answer."""
    answer: str
    guesses: tuple[str, ...]
    """Answers of the same kind, from which a careless reader takes one."""

    def prompt(self, wording: Wording) -> str:
        """Return the question with the form of its answer; a small model learns the form from demonstrations."""
        return self.short if wording == "short" else f"{self.question} Answer with the name between <answer> and </answer>."


def fact_chains(
    *,
    num_rows: Count = 1024,
    hops: str = "2,3",
    wording: Wording = "words",
    play: Play = "none",
    sensible: Fraction = 0.0,
    worlds: Count = 1,
    split: Literal["train", "val"] = "train",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of a question about the made-up world that takes one of the `hops` (from 1 to 4) look-ups in its texts.

    The ground truth is a name; `extra_info.hops` are the look-ups. With `play=random` a row has in `messages` how a careless reader
    answers it with the tool `search`: each look-up is made with the probability `sensible`, and the first one that is not is
    replaced by a guess. These rows are about so many `worlds`, each with names of its own, so that names have to be copied from the
    texts: those of one world are learnt by heart. The splits share no question. Row i is drawn from (seed, i). Raises ConfigError for
    options out of range.
    """
    refuse(
        NAME,
        (
            all(part in ("1", "2", "3", "4") for part in hops.split(",")),
            f"hops={hops} must be from 1 to 4, or several such like 2,3",
        ),
        (worlds == 1 or play == "random", f"worlds={worlds} is for play=random: the tool `search` has the texts of one"),
    )
    counts = [int(part) for part in hops.split(",")]

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        while True:
            count = rng.choice(counts)
            known = world(rng.randrange(worlds) if worlds > 1 else 0)
            chain = _asked(rng, count, known)
            if split_of_text(chain.question) != split:
                continue
            extra_info = {"split": split, "index": index, "hops": count}
            row = row_of(NAME, chain.prompt(wording), chain.answer, extra_info, "search")
            return row if play == "none" else {**row, "messages": [*row["prompt"], *_read(rng, chain, sensible, known)]}

    return LazyRows(num_rows, make)


def _read(rng: random.Random, chain: Chain, sensible: float, known: World) -> list[Message]:
    """Return the turns of a careless reader, calls in the form that Qwen's models write, results as `search` gives the best one."""
    texts, answer = known.texts(), chain.answer
    messages: list[Message] = []
    for query, name in chain.look_ups:
        if rng.random() >= sensible:
            answer = rng.choice(chain.guesses)
            break
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
        messages.append({"role": "tool", "content": f"[{name}] {texts[name]}"})
    return [*messages, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


def _asked(rng: random.Random, hops: int, known: World) -> Chain:
    """Return a question of so many look-ups."""
    by_name = {person.name: person for person in known.people}
    person = rng.choice(known.people)
    teacher = by_name[person.teacher]
    lands = tuple(sorted(set(known.lands.values())))
    author = f'author of "{person.book}"'
    by_book = (person.book, person.text("wrote"))
    kind = rng.choice(("land", "book")) if hops == 2 else ""

    def steps(*names: str) -> tuple[tuple[str, str], ...]:
        return tuple((name, name) for name in names)

    to_teacher = steps(person.text("taught"), teacher.text("born"), teacher.town)
    land, land_of_teacher = known.lands[person.town], known.lands[teacher.town]
    if hops == 1:
        return Chain(f"What is the name of the {author}?", author, (by_book,), person.name, tuple(by_name))
    if kind == "land":
        question, short = f"In which land was {person.name} born?", f"land of {person.name}"
        return Chain(question, short, steps(person.text("born"), person.town), land, lands)
    if kind == "book":
        question, short = f"Which book did the teacher of {person.name} write?", f"book of teacher of {person.name}"
        books = tuple(one.book for one in known.people)
        return Chain(question, short, steps(person.text("taught"), teacher.text("wrote")), teacher.book, books)
    if hops == 3:
        question = f"In which town was the teacher of {person.name} born, and in which land does it lie? Give the land."
        return Chain(question, f"land of teacher of {person.name}", to_teacher, land_of_teacher, lands)
    question, short = f"In which land was the teacher of the {author} born?", f"land of teacher of {author}"
    return Chain(question, short, (by_book, *to_teacher), land_of_teacher, lands)
