"""Writes sentences.csv and questions.csv (column question_text), from WordNet's glosses and the fortunes: free, on Debian by
`apt install wordnet-base fortunes`.

    python texts.py [WORDNET [FORTUNES]]
"""

import csv
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PLAIN = re.compile(r"(?!.*\b[A-Z]{2})(?!.*--)[A-Za-z ,.;:!?'-]+")
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
PERSON, PLACE = "18", "15"  # WordNet's files of the lexicographers


def main(wordnet: str = "/usr/share/wordnet", fortunes: str = "/usr/share/games/fortunes") -> None:
    rng = random.Random(0)
    glosses = [*read_glosses(Path(wordnet))]
    texts = [*told(Path(fortunes)), *explained(gloss for *_, gloss in glosses)]
    asked = [*sums(rng), *about(glosses, Path(wordnet), rng)]
    for name, rows in (("sentences", joined(distinct(texts), rng)), ("questions", sorted(set(asked)))):
        rng.shuffle(rows)
        with open(f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["question_text"], *([row] for row in rows)])
        print(f"{name}.csv: {len(rows):,} rows")


def read_glosses(wordnet: Path) -> Iterator[tuple[str, list[str], str]]:
    """Part of speech (1 noun, 2 verb, 3 adjective), fields and gloss of each synset."""
    for part, name in enumerate(("noun", "verb", "adj"), 1):
        for line in (wordnet / f"data.{name}").read_text().splitlines():
            fields, bar, gloss = line.partition(" | ")
            if bar:
                yield str(part), fields.split(), gloss


def told(fortunes: Path) -> Iterator[str]:
    """The sentences of the fortunes."""
    for file in sorted(fortunes.iterdir()):
        if re.fullmatch(r"[^.]*[a-z]", file.name) and file.name not in ("art", "ascii-art"):
            for entry in file.read_text(errors="replace").split("\n%\n"):
                yield from re.split(r"(?<=[.!?])\s+", " ".join(entry.split()))


def explained(glosses: Iterable[str]) -> Iterator[str]:
    """The examples and definitions of glosses."""
    for gloss in glosses:
        yield from re.findall('"([^"]+)"', gloss)
        for definition in re.sub(r'"[^"]*"|\([^)]*\)', "", gloss).split(";"):
            if len(definition.split()) > 3:
                yield definition


def distinct(texts: Iterable[str]) -> list[str]:
    """The texts of 3 to 16 plain words, each once."""
    kept = dict[str, str]()
    for text in texts:
        text = " ".join(text.split()).strip(' "')
        if 3 <= len(text.split()) <= 16 and len(text) < 96 and PLAIN.fullmatch(text):
            kept.setdefault(re.sub("[^a-z' ]", "", text.lower()), text[0].upper() + text[1:])
    return [*kept.values()]


def joined(texts: list[str], rng: random.Random) -> list[str]:
    """The texts in another order, in which most short ones are joined: they fill the encoder's window."""
    rng.shuffle(texts)
    rows = list[str]()
    for text in texts:
        if rows and rng.random() < 0.75 and len(f"{rows[-1]} {text}".split()) <= 15:
            text = f"{rows.pop().rstrip('.,;:')}. {text}"
        rows.append(text)
    return rows


def about(glosses: Iterable[tuple[str, list[str], str]], wordnet: Path, rng: random.Random) -> Iterator[str]:
    """A question about each capital, person and known place of WordNet, and each common noun and adjective."""
    senses = [line.split() for line in (wordnet / "cntlist.rev").read_text().splitlines()]
    counts = {key.split(":")[0]: int(count) for key, _, count in reversed(senses)}  # of a word's commonest sense
    for part, fields, gloss in glosses:
        words = [word.split("(")[0].replace("_", " ") for word in fields[4::2]]
        word, count = words[0], counts.get(f"{words[0].lower()}%{part}", 0)
        noun = f"an {word}" if word[0] in "aeiou" else f"a {word}"
        for country in re.findall(r"\bcapital (?:and [a-z ]+ )?of ((?:[A-Z][a-z]+ ?)+\b)", gloss):
            yield rng.choice(["What is the capital of {}?", "Which city is the capital of {}?"]).format(country.strip())
        if not PLAIN.fullmatch(word):
            continue
        if "@i" in fields and fields[2] == PERSON and words[1][0].isupper():
            yield rng.choice(["Who was {}?", "What was {} known for?"]).format(words[1])
        elif "@i" in fields and fields[2] == PLACE and count:
            yield f"Where is {word}?"
        elif count > 4 and part == "1" and word.islower():
            yield rng.choice(["What is {}?", "Can you explain what {} is?"]).format(noun)
        elif count > 4 and part == "3":
            yield rng.choice(["What is the opposite of {}?", "Give me another word for {}."]).format(word)


def sums(rng: random.Random) -> Iterator[str]:
    for a in NUMBERS:
        for b in NUMBERS:
            yield rng.choice(["What is {} plus {}?", "How much is {} and {}?", "Add {} and {}."]).format(a, b)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is not there: install wordnet-base and fortunes, or say texts.py WORDNET FORTUNES")
