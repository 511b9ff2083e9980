"""Small repositories with one wrong function: their words, their files, and what a shell would say in them.

A package is a file of three shell functions, each of which prints one word, and a test that knows what they
should print. One function prints a wrong word. Which, is said; what it should print, only the test says.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

SYLLABLES = (
    *("ba", "be", "bi", "bo", "bu", "da", "do", "du", "fe", "ga", "go", "ja", "ji", "jo", "ju", "ka"),
    *("ki", "ko", "ku", "la", "li", "lu", "mo", "mu", "ni", "nu", "pi", "va", "vi", "vo", "vu", "wa"),
    *("we", "wi", "wo", "wu", "za", "ze", "zi", "zo", "zu"),
)
"""Words are two of these. None occurs in the text around them, so that each is one token everywhere."""
FUNCTIONS = 3  # functions of a package
TWIN = 0.5  # share of packages with a second function that rightly prints the wrong function's word
MISSING = "No such file or directory"


@dataclass(frozen=True)
class Words:
    packages: Sequence[str]
    functions: Sequence[str]
    messages: Sequence[str]


def split_words() -> dict[str, Words]:
    """Split the words in two disjoint sets. No word has two meanings."""
    words = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)]
    random.Random(0).shuffle(words)
    left = iter(words)
    counts = {"test": (256, 64, 64), "train": (512, 256, 256)}
    return {
        split: Words(*(tuple(itertools.islice(left, count)) for count in list_sizes))
        for split, list_sizes in counts.items()
    }


@dataclass(frozen=True)
class Puzzle:
    """A package of functions that print words: `expected`, but `wrong_function` prints `printed` instead."""

    package: str
    expected: Mapping[str, str]
    wrong_function: str
    printed: str

    @property
    def question(self) -> str:
        return f"The test of {self.wrong_function} in {self.package}.sh fails."

    @property
    def wanted(self) -> str:
        return self.expected[self.wrong_function]

    @cached_property
    def files(self) -> dict[str, str]:
        """Return the package and the test that the agent sees."""
        prints = {**self.expected, self.wrong_function: self.printed}
        source = "".join(f"{name}() {{ echo {word}; }}\n" for name, word in prints.items())
        checks = "".join(f"check {name} {word}\n" for name, word in self.expected.items())
        test = (
            f". ./{self.package}.sh\n"
            'check() { [ "$($1 2>/dev/null)" = "$2" ] || { echo "$1: expected $2"; failed=1; }; }\n'
            f"{checks}exit ${{failed:-0}}\n"
        )
        return {f"{self.package}.sh": source, "test.sh": test}


def make_puzzle(rng: random.Random, words: Words, package: str = "") -> Puzzle:
    names = rng.sample(words.functions, FUNCTIONS)
    printed, *messages = rng.sample(words.messages, FUNCTIONS + 1)
    expected = dict(zip(names, messages, strict=True))
    wrong_function, other_function, _ = rng.sample(names, FUNCTIONS)
    if rng.random() < TWIN:
        expected[other_function] = printed
    return Puzzle(package or rng.choice(words.packages), expected, wrong_function, printed)


class Shell:
    """Runs the commands of the demonstrations on a puzzle's files, as a real shell would."""

    def __init__(self, puzzle: Puzzle) -> None:
        self.files = dict(puzzle.files)
        self._puzzle = puzzle

    def run(self, command: str) -> str:
        name = command.split()[-1] if command.split() else ""
        if command == "sh test.sh":
            return self._failures()
        if command == "ls":
            return "\n".join(sorted(self.files))

        if match := re.fullmatch(r"grep (\w+) (\S+)", command):
            if match[2] not in self.files:
                return f"grep: {match[2]}: {MISSING}\n[exit status 2]"
            lines = [line for line in self.files[match[2]].splitlines() if match[1] in line]
            return "\n".join(lines) or "[exit status 1]"

        if edit := re.fullmatch(r"sed -i (?:/(\w+)/)?s/(\w+)/(\w+)/ (\S+)", command):
            line, old, new, name = edit.groups()
            if name not in self.files:
                return f"sed: can't read {name}: {MISSING}\n[exit status 2]"
            lines = self.files[name].splitlines()
            lines = [text.replace(old, new, 1) if (line or "") in text else text for text in lines]
            self.files[name] = "\n".join(lines) + "\n"
            return "[no output]"

        return f"sh: 1: {name}: not found\n[exit status 127]"

    def printed(self) -> dict[str, str]:
        """Find what each function prints."""
        source = self.files[f"{self._puzzle.package}.sh"]
        return dict(re.findall(r"(\w+)\(\) { (?:echo|printf) (\w+); }", source))

    @property
    def solved(self) -> bool:
        """Judge as the hidden tests do, which know the puzzle and not the test among the files."""
        return self.printed() == self._puzzle.expected

    def _failures(self) -> str:
        checks = re.findall(r"^check (\w+) (\w+)$", self.files["test.sh"], re.M)
        printed = self.printed()
        lines = [f"{name}: expected {word}" for name, word in checks if printed.get(name) != word]
        return "\n".join([*lines, "[exit status 1]"]) if lines else "[no output]"
