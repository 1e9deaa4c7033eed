"""Write the data of the suite: data/<task>/{train,validation,test}.jsonl, the same bytes on every run.

    python examples/suite/make_data.py [FOLDER]

Every task lists all that can be asked as (key, ways to ask it, answer). The keys are shuffled by a fixed
seed; 100 of them become the validation set and 100 the test set, asked once each, and others the training
set, so that no key of one set is in another, however it is worded. All word lists are our own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

HERE = Path(__file__).parent
HELD_OUT = {"validation": 100, "test": 100}
TRAIN = 1600


def words(text: str) -> list[str]:
    return text.split(", ")


class Item(NamedTuple):
    """Something to ask: what makes it one, the prompts that ask it, and the fields of its answer."""

    key: str
    prompts: tuple[str, ...]
    answer: dict[str, Any]


def clock() -> Iterator[Item]:
    """24-hour times to 12-hour times."""
    for hour, minute in product(range(24), range(60)):
        time = f"{hour:02}:{minute:02}"
        said = f" {(hour - 1) % 12 + 1}:{minute:02} {'am' if hour < 12 else 'pm'}"
        yield Item(time, (f"24h: {time}\n12h:",), {"target": said})


PEOPLE = words(
    "Anna, Boris, Carla, David, Elena, Felix, Greta, Hugo, Irene, Jonas, Karin, Louis, Maria, Niels, "
    "Olga, Peter, Rosa, Simon, Tina, Victor"
)
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
GOODS = words(
    "apple, chair, lamp, pizza, ticket, shirt, book, pencil, candle, plant, mirror, blanket, bottle, "
    "bucket, hammer, pillow, basket, cake, carpet, clock, jacket, kettle, towel, window"
)


def order() -> Iterator[Item]:
    """Orders in a sentence to JSON."""
    for person, (word, count), item in product(PEOPLE, NUMBERS.items(), GOODS):
        prompts = (
            f"Order: {person} wants {word} {item}s.\nJSON:",
            f"Order: Please send {word} {item}s to {person}.\nJSON:",
            f"Order: {word.capitalize()} {item}s for {person}, please.\nJSON:",
        )
        found = {item: count, "for": person}
        yield Item(f"{person} {word} {item}", prompts, {"target": " " + json.dumps(found)})


TABLES = words(
    "pilots, nurses, students, drivers, teachers, painters, doctors, farmers, players, workers, "
    "lawyers, singers, bakers, sailors, writers, dancers"
)
CITIES = words("Paris, London, Berlin, Madrid, Rome, Vienna, Oslo, Dublin, Prague, Lisbon")
FIELDS = {"names": "name", "emails": "email", "phones": "phone", "ages": "age"}


def sql() -> Iterator[Item]:
    """Requests to SQL."""
    conditions = [(f"in {city}", f"city = '{city}'") for city in CITIES]
    conditions += [(f"older than {age}", f"age > {age}") for age in range(20, 65, 5)]
    conditions += [(f"younger than {age}", f"age < {age}") for age in range(20, 65, 5)]
    for table, (plural, field), (said, condition) in product(TABLES, FIELDS.items(), conditions):
        request = f"{plural} of {table} {said}"
        prompts = tuple(
            f"Request: {verb} {request}\nSQL:" for verb in ("show the", "list the", "give me the")
        )
        query = f" SELECT {field} FROM {table} WHERE {condition}"
        yield Item(request, prompts, {"target": query})


SUBJECTS = {
    "billing": words("invoice, payment, refund, fee, charge, discount, receipt, bill, price, deposit"),
    "delivery": words("parcel, package, courier, shipment, box, letter, driver, crate, delivery, truck"),
    "account": words("password, login, username, profile, account, email, avatar, membership, code, session"),
    "repair": words("screen, battery, keyboard, printer, engine, speaker, charger, camera, button, cable"),
}
PROBLEMS = words(
    "is wrong again, has a problem, is still missing, is not right, was changed without asking, "
    "worries me, is a mess, needs your attention, was fine last week, is not what I expected"
)


def triage() -> Iterator[Item]:
    """Messages of customers to the team that answers them."""
    teams = [f" {team}" for team in SUBJECTS]
    for answer, subjects in enumerate(SUBJECTS.values()):
        for subject, problem in product(subjects, PROBLEMS):
            core = f"the {subject} {problem}."
            openers = ("Hello, ", "Sorry, but ", "I think ", "As I said, ")
            prompts = tuple(f"Message: {opener}{core}\nTeam:" for opener in openers)
            yield Item(core, prompts, {"choices": teams, "answer": answer})


ADJECTIVES = words(
    "Green, Northern, United, Modern, Royal, Open, Central, Junior, Global, Digital, Eastern, Young"
)
TRADES = words(
    "Forest, Music, River, Chess, Energy, Health, Bicycle, Water, Poetry, Theatre, Language, Volcano"
)
BODIES = words(
    "Society, Institute, Council, Trust, Academy, Union, Foundation, League, Network, Bureau, "
    "Archive, Workshop"
)


def initials() -> Iterator[Item]:
    """Names of bodies to their initials."""
    for words in product(ADJECTIVES, TRADES, BODIES):
        name = " ".join(words)
        yield Item(name, (f"Name: {name}\nInitials:",), {"target": " " + "".join(f"{w[0]}." for w in words)})


TASKS: dict[str, Callable[[], Iterator[Item]]] = {
    task.__name__: task for task in (clock, initials, order, sql, triage)
}


def split(task: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of a task's three sets."""
    items = list(TASKS[task]())
    Random(f"coram {task}").shuffle(items)
    count = sum(HELD_OUT.values())
    held_out, train = items[:count], items[count:]
    assert len({item.key for item in items}) == len(items) > count, f"{task}: a key comes twice"
    lines = [{"prompt": prompt, **item.answer} for item in train for prompt in item.prompts]
    Random(f"coram {task} train").shuffle(lines)
    asked = (
        {"prompt": item.prompts[i % len(item.prompts)], **item.answer} for i, item in enumerate(held_out)
    )
    return {"train": lines[:TRAIN], **{part: list(islice(asked, n)) for part, n in HELD_OUT.items()}}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data"
    for task in TASKS:
        (folder / task).mkdir(parents=True, exist_ok=True)
        for part, lines in split(task).items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / task / f"{part}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
