"""Makes prompts of many kinds from a recipe file and passages, row by row.

The prompt of row n depends on the recipe, the passages, the seed and n alone, so that any machine
can write any part of the rows. Lists are dealt like cards: no entry comes a second time before all
came once. Called by `selfgen`.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import string
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, InvalidOption, check_keys, check_types, record_of
from selfspec.files import local_path, read_yaml
from selfspec.training.text import texts_in

BUILT_IN = Path(str(resources.files(__package__).joinpath("text.yaml")))

OWN = "questions"  # the family of a user's own prompts
_OWN_SHARE = 0.1

_CYCLE = 1000  # rows within which each family has its share; weights are rounded to that
_MOST_PASSAGES = 256 << 20  # characters of a folder of passages that are kept in memory
_MOST_PARTS = 8  # passages in a prompt


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Which text replaces {passage} in a family."""

    tokens: tuple[int, int]  # fewest and most tokens of a passage, drawn log-uniformly
    count: tuple[int, int] = (1, 1)  # fewest and most passages in a prompt; several are numbered
    language: tuple[str, ...] = ("en",)

    def __post_init__(self) -> None:
        for name, most in (("tokens", 1 << 20), ("count", _MOST_PARTS)):
            low, high = getattr(self, name)
            if not 1 <= low <= high <= most:
                raise InvalidOption(f"{name} is {low}, {high}, expected a range in 1..{most}")

    def sizes(self, rng: random.Random) -> list[int]:
        """Draw how many tokens each passage of a prompt should have."""
        low, high = self.tokens
        return [round(low * (high / low) ** rng.random()) for _ in range(rng.randint(*self.count))]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Prompts of one kind."""

    name: str
    weight: float  # its share of the rows, relative to the others' weights
    ask: tuple[tuple[str | None, ...], ...]
    """Ways to ask, each the user's turns of a conversation; the model invents a turn of None."""
    passage: Passage | None = None
    question: tuple[str, ...] = ()  # beginnings of a question about the passage, for {question}
    continues: bool = False  # the model continues the first turn until the user's turn ends
    passages: bool = False  # answers are articles: passages for other families of the same batch
    read: bool = False  # the text is only read: nothing is answered

    def __post_init__(self) -> None:
        if self.weight <= 0.0:
            raise InvalidOption(f"weight is {self.weight}, expected above 0")
        if not self.ask or not all(ask and ask[0] is not None for ask in self.ask):
            raise InvalidOption("ask holds no first turn")
        if self.question and self.passage is None:
            raise InvalidOption("a question needs a passage")

    def is_invented(self, *, raw: bool) -> bool:
        """Whether the model writes a part of the user's turns; a `raw` row has the first only."""
        turns = self.continues or any(None in ask for ask in self.ask)
        return bool(self.question) or (turns and not raw)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, from which the rows of a file are made."""

    families: tuple[Family, ...]
    lists: Mapping[str, tuple[str, ...]]
    languages: Mapping[str, str]  # English names of passages' languages, by two letters
    written_share: float  # share of the English passages that are articles of the same batch
    digest: str  # hash of all values above, for the record


@dataclass
class Row:
    """One row to write: its family, and the values drawn for it."""

    family: Family
    number: int
    turns: tuple[str | None, ...]
    values: dict[str, str]
    rng: random.Random = field(repr=False)  # for random choices while the row is written
    language: str = "en"  # the language of {passage}
    reads_article: bool = False  # {passage} is to be an article of the same batch

    def text(self, turn: str | None) -> str | None:
        """One of the user's turns, with its values filled in."""
        return None if turn is None else turn.format_map(self.values)


def read_recipe(path: str | Path | None = None) -> Recipe:
    """Read a recipe file, or the built-in one. Raises InvalidData: file, place, reason."""
    path = BUILT_IN if path is None else local_path(path)
    fields = read_yaml(path)
    try:
        return _recipe(fields)
    except InvalidOption as error:
        raise InvalidData(f"{path}: {error}") from error


class Passages:
    """Paragraphs of the text files in a folder; a sub-folder `de` holds German ones, and so on."""

    def __init__(
        self, folder: str | Path | None = None, languages: Collection[str] = ("en",)
    ) -> None:
        """Raises InvalidData for a folder without text, or with more than fits into memory."""
        self.digest = ""
        self.languages = set[str]()
        self._starts: dict[str, list[tuple[list[str], int]]] = {}  # a file's paragraphs, and where
        if folder is None:
            return
        digest, room = hashlib.sha256(), _MOST_PASSAGES
        for name, content in texts_in(folder):
            match = re.match(r"([a-z]{2})/", name)
            if match and match[1] not in languages:
                continue  # of a language that the recipe has no name for
            text = content.replace("\r\n", "\n")
            room -= len(text)
            if room < 0:
                raise InvalidData(f"{folder} holds more than {_MOST_PASSAGES >> 20} MB of text")
            digest.update(f"{name}\0{text}\0".encode("utf-8", "surrogateescape"))
            paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
            starts = self._starts.setdefault(match[1] if match else "en", [])
            starts += [(paragraphs, index) for index in range(len(paragraphs))]
        self.languages = {name for name, starts in self._starts.items() if starts}
        self.digest = digest.hexdigest()[:16]

    def draw(self, language: str, number: int, seed: str, characters: int) -> str:
        """The `number`-th passage: paragraphs of at least `characters`, if the file has as many."""
        starts = self._starts[language]
        paragraphs, first = starts[deal(len(starts), number, f"{seed} {language}")]
        last, room = first, characters
        while room > 0 and last < len(paragraphs):
            room -= len(paragraphs[last])
            last += 1
        return "\n\n".join(paragraphs[first:last])


class Prompts:
    """Makes rows by number."""

    def __init__(
        self,
        recipe: Recipe,
        passages: Passages,
        seed: int,
        questions: Sequence[tuple[str, ...]] = (),
        *,
        invents: bool = True,
        raw: bool = False,
    ) -> None:
        """`questions`: a user's prompts, each the turns of a conversation; every one is asked once.

        Leaves out families whose passages have no text, and, unless the model `invents` user turns,
        those that need such turns; `left_out` names them. `raw`: the model continues openings, and
        only the first turn of a conversation is used.
        """
        self._recipe, self._passages, self._seed = recipe, passages, seed
        self._questions, self._raw = questions, raw
        usable = [
            family
            for family in recipe.families
            if self._has_text(family) and (invents or not family.is_invented(raw=raw))
        ]
        self.article_families = {family.name for family in usable if family.passages}
        self.left_out = [f.name for f in recipe.families if f not in usable]
        if not usable:
            raise InvalidData("no family of the recipe can be used. Give --passages")
        if questions:
            weight = sum(family.weight for family in usable) * _OWN_SHARE / (1.0 - _OWN_SHARE)
            usable.append(Family(name=OWN, weight=weight, ask=(("",),)))
        self._cycle = _interleave(usable)
        self._counts = Counter(family.name for family, _ in self._cycle)
        self._checked_rows = 0  # rows, of which no model writes these first turns; and where first
        self._first_rows: dict[bytes, int] = {}

    def row(self, number: int) -> Row | None:
        """Row `number`, from 0; None if it is for own prompts and all of these were asked."""
        cycle, place = divmod(number, len(self._cycle))
        family, rank = self._cycle[place]
        turn = cycle * self._counts[family.name] + rank  # the family's turn-th row
        rng = random.Random(f"{self._seed} {number}")
        if family.name == OWN:
            if turn >= len(self._questions):
                return None
            # the prompt is a value: its braces are no placeholders
            turns = {f"turn{index}": text for index, text in enumerate(self._questions[turn])}
            return Row(family, number, tuple(f"{{{name}}}" for name in turns), turns, rng)
        seed = f"{self._seed} {family.name}"
        row = Row(family, number, family.ask[deal(len(family.ask), turn, seed)], {}, rng)
        names = {name for turn in row.turns if turn for name in _placeholders(turn)}
        for name in sorted(names & self._recipe.lists.keys()):
            values = self._recipe.lists[name]
            row.values[name] = values[deal(len(values), turn, f"{seed} {name}")]
        if family.passage is not None:  # its language and origin
            languages = self._passages.languages
            usable = [name for name in family.passage.language if name in languages or name == "en"]
            row.language = usable[deal(len(usable), turn, f"{seed} language")]
            row.values["language"] = self._recipe.languages.get(row.language, "English")
            written = row.rng.random() < self._recipe.written_share
            row.reads_article = row.language == "en" and (written or "en" not in languages)
        return row

    def is_repeat(self, row: Row) -> bool:
        """Whether a row with a lower number asks the same, as far as known without a model."""
        for number in range(self._checked_rows, row.number + 1):
            if (digest := self._turn_key(self.row(number))) is not None:
                self._first_rows.setdefault(digest, number)
        self._checked_rows = max(self._checked_rows, row.number + 1)
        digest = self._turn_key(row)
        return digest is not None and self._first_rows[digest] < row.number

    def _turn_key(self, row: Row | None) -> bytes | None:
        """The `key` of a row's first turn; None if it depends on a model or a passage."""
        if row is None:
            return None
        family = row.family
        if family.passage or family.question or (family.continues and not self._raw):
            return None
        return key(row.text(row.turns[0]) or "")

    def passages_of(self, row: Row, sizes: Sequence[int]) -> list[str]:
        """Passages from the folder, each long enough for its size in tokens if the file is."""
        places = enumerate(sizes, start=row.number * _MOST_PARTS)  # no two rows take the same
        draw, seed = self._passages.draw, str(self._seed)
        return [draw(row.language, place, seed, 8 * size) for place, size in places]

    def _has_text(self, family: Family) -> bool:
        if family.passage is None or self._passages.languages & set(family.passage.language):
            return True
        return "en" in family.passage.language and any(f.passages for f in self._recipe.families)


def key(text: str) -> bytes:
    """A hash that is the same for duplicates; case and white space do not count."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()


def deal(count: int, number: int, seed: str) -> int:
    """Card `number` of a deck of `count` cards, which is shuffled again once all are dealt."""
    deck, place = divmod(number, count)
    return _deck(count, f"{seed} {deck}")[place]


@functools.lru_cache(maxsize=4096)
def _deck(count: int, seed: str) -> list[int]:
    cards = list(range(count))
    random.Random(seed).shuffle(cards)
    return cards


def _interleave(families: Sequence[Family]) -> list[tuple[Family, int]]:
    """A cycle of families with their shares, evenly spread, and each row's rank in its family."""
    total = sum(family.weight for family in families)
    places: list[tuple[float, int, int]] = []
    for index, family in enumerate(families):
        count, shift = max(1, round(_CYCLE * family.weight / total)), (index + 0.5) / len(families)
        places += [((rank + shift) / count, index, rank) for rank in range(count)]
    return [(families[index], rank) for _, index, rank in sorted(places)]


# --- reading a recipe

_KEYS = {"families": dict, "lists": dict, "languages": dict, "written-share": float}


def _recipe(fields: Any) -> Recipe:
    if not isinstance(fields, dict):
        raise InvalidOption("expected families and lists, each with a name")
    check_keys(map(str, fields), _KEYS, "key")
    fields = {name: value for name, value in fields.items() if value is not None}
    check_types(fields, _KEYS)
    lists = {}
    for name, values in fields.get("lists", {}).items():
        label = f"the list {name}"
        check_types({label: values}, {label: list[str | int | float]})
        if not values:
            raise InvalidOption(f"{label} is empty, expected texts or numbers")
        lists[str(name)] = tuple(str(value) for value in values)
    languages = {str(k): str(v) for k, v in fields.get("languages", {}).items()}
    families = []
    for name, values in fields.get("families", {}).items():
        try:
            families.append(_family(str(name), values, set(lists), {"en", *languages}))
        except InvalidOption as error:
            raise InvalidOption(f"family {name}: {error}") from error
    share = fields.get("written-share", 0.5)
    if not 0.0 <= share <= 1.0:
        raise InvalidOption(f"written-share is {share}, expected 0 to 1")
    if not families:
        raise InvalidOption("families is empty, expected at least one")
    if OWN in fields["families"]:
        raise InvalidOption(f"{OWN} is the family of --questions. Name yours otherwise")
    content = repr((tuple(families), lists, languages, share))
    return Recipe(
        families=tuple(families),
        lists=lists,
        languages={"en": "English"} | languages,
        written_share=share,
        digest=hashlib.sha256(content.encode()).hexdigest()[:16],
    )


def _family(name: str, values: Any, lists: set[str], languages: set[str]) -> Family:
    if isinstance(values, dict):
        values = values | {"name": name}
        if isinstance(asks := values.get("ask"), list):
            values["ask"] = [ask if isinstance(ask, list) else [ask] for ask in asks]
    family = record_of(Family, values)
    known = lists | ({"question"} if family.question else set())
    if (passage := family.passage) is not None:
        known |= {"passage", "language"}
        unknown = set(passage.language) - languages
        if unknown or not passage.language:
            raise InvalidOption(f"language {', '.join(sorted(unknown))} has no name")
    for turn in (turn for ask in family.ask for turn in ask if turn is not None):
        try:
            names = set(_placeholders(turn))
        except ValueError as error:
            raise InvalidOption(f"{turn[:60]!r}: {error}") from error
        if names - known:
            raise InvalidOption(
                f"{{{min(names - known)}}} in {turn[:60]!r} is none of the lists; write a literal "
                "brace twice"
            )
    return family


def _placeholders(text: str) -> Iterator[str]:
    """Yield the names in braces. Raises ValueError for anything else in braces."""
    for _, name, format_spec, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        if not re.fullmatch(r"[a-z_]+", name) or format_spec or conversion:
            raise ValueError(f"{{{name}}} is no name of a list")
        yield name
