"""Text for training: reads conversations from rows in common formats, and writes new rows.

New rows become lines of OUTPUT, plain or gzipped. OUTPUT.run.json beside it records how they are
made, how many bytes hold whole batches, and which lines come next, so that lines which a killed
run left half-written can be told from lines of somebody else. Imports no torch.
"""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from selfspec import files
from selfspec.api.chat_template import advice, apply_template, turn_end
from selfspec.errors import (
    CannotWrite,
    InvalidData,
    InvalidOption,
    InvalidPrompt,
    first_line,
    fits,
    hint_name,
    record_of,
    require_same,
    shown,
)
from selfspec.files import local_path, open_bytes, read_json, read_text
from selfspec.hub.models import HUB_ID
from selfspec.training.options import explain_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, str]
Record = dict[str, Any]

_ROLES = {name: name for name in ("system", "user", "assistant")}
_SHAREGPT_ROLES = _ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
_TABLES = (".parquet", ".csv")  # read with the package datasets
_FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".txt", *_TABLES)
_BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, and white space
_EXPECTED = "input_ids and answer_start, messages, conversations, turns or text"

_MOST_LINE = 16 << 20  # bytes of a line, and of consecutive blank lines
_MOST_ARRAY = 1 << 30  # bytes of a .json file that is one array, which is read whole

T = TypeVar("T")


class Conversation(NamedTuple):
    """One text and which of its tokens are the model's answers, if any."""

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    """First and one-past-last index in `ids` of each answer, rising from 1 or more."""

    @property
    def answer_ids(self) -> list[int]:
        """The tokens that heads learn to predict."""
        return [token for first, end in self.answers for token in self.ids[first:end]]


@dataclass
class Reader(Generic[T]):
    """Parses each row of a source; a bad row is an error, or skipped and counted."""

    source: str | Path  # a file, a folder for the package datasets, or a data set's hub id
    parse: Callable[[dict[str, Any]], T]
    """Raises InvalidData or InvalidPrompt, with the reason alone, for an unusable row."""
    skip_bad_rows: bool | None = None  # None: the caller has no such option
    num_skipped: int = 0
    first_skipped: str = field(default="", init=False)

    def __iter__(self) -> Iterator[T]:
        """Yield parsed rows. Raises InvalidData: source, row, reason."""
        for place, row in rows(self.source):
            try:
                parsed = self.parse(_record(row))
            except (InvalidData, InvalidPrompt) as error:
                if not self.skip_bad_rows:
                    advice = "" if self.skip_bad_rows is None else ". Skip them: --skip-bad-rows"
                    raise InvalidData(f"{self.source}, {place} {error}{advice}") from error
                self.first_skipped = self.first_skipped or f"{place} {error}"
                self.num_skipped += 1
                continue
            yield parsed

    def report(self) -> None:
        """Log how many rows were skipped, and why the first was."""
        if self.num_skipped:
            message = "%s: skipped %d bad rows, the first: %s"
            logger.warning(message, self.source, self.num_skipped, self.first_skipped)


def read_conversations(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    max_length: int,
    max_tokens: int | None = None,
    skip_bad_rows: bool = False,
) -> list[Conversation]:
    """Read the conversations of a file or data set, up to `max_tokens` answer tokens.

    Raises InvalidData: file, line, reason. With `skip_bad_rows`, bad rows are skipped and counted.
    """

    def parse(record: dict[str, Any]) -> list[Conversation]:
        for ids, _ in (conversations := encode(record, tokenizer)):
            if len(ids) < 2:
                raise InvalidData(f"has {len(ids)} tokens, expected at least 2")
            if len(ids) > max_length:
                raise InvalidData(f"has {len(ids)} tokens, at most {max_length} fit into a batch")
            for token in (min(ids), max(ids)):
                if not 0 <= token < vocab_size:
                    raise InvalidData(f"holds token id {token}, expected 0..{vocab_size - 1}")
        return conversations

    reader = Reader(path, parse, skip_bad_rows=skip_bad_rows)
    conversations, room = list[Conversation](), max_tokens or sys.maxsize
    for conversation in itertools.chain.from_iterable(reader):
        conversations.append(conversation)
        if (room := room - len(conversation.answer_ids)) <= 0:
            break
    reader.report()
    if not conversations:
        raise InvalidData(f"{path} holds no conversations. Expected one JSON object per line")
    return conversations


def split(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Split off the last 20th to validate; the rest is to fit. Raises InvalidData for one text."""
    if len(conversations) < 2:
        raise InvalidData("one conversation is too few to fit and to validate. Give --validation")
    count = max(1, len(conversations) // 20)
    return list(conversations[:-count]), list(conversations[-count:])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, including those without a role (such as end of text)."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


# --- sources


def check_source(source: str | Path) -> None:
    """Raise InvalidData for a file that cannot be read."""
    if (path := _file_of(source)) is not None:
        with _open(path):
            pass


def texts_in(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each .txt, .md and .rst file. Raises InvalidData for none."""
    folder, suffixes = local_path(folder), (".txt", ".md", ".rst")
    if not folder.is_dir():
        raise InvalidData(f"{folder} is no folder. Give one with {', '.join(suffixes)} files")
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    if not paths:
        raise InvalidData(f"{folder} holds no text. Put {', '.join(suffixes)} files there")
    for path in paths:
        yield path.relative_to(folder).as_posix(), read_text(path)


def rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield each row's place and content: bytes of a JSON line, or a value. Raises InvalidData."""
    path = _file_of(source)
    if path is None or path.suffix in _TABLES:
        yield from _data_set(local_path(source).as_posix(), path)
        return
    with _open(path) as file:
        if path.name.endswith((".json", ".json.gz")):  # one array, like ShareGPT, or lines
            begin = file.read(_MOST_LINE).lstrip(_BLANK)
            file.seek(0)
            if begin.startswith(b"["):
                array = file.read(_MOST_ARRAY + 1)
                if len(array) > _MOST_ARRAY:
                    raise InvalidData(f"{path} has over {_MOST_ARRAY} bytes. Give it as .jsonl")
                for number, item in enumerate(_parse_json(array, f"{path} "), start=1):
                    yield f"item {number}", item
                return
        yield from _lines(path, file)


def _file_of(source: str | Path) -> Path | None:
    """The file that a source names; None for a data set. Raises InvalidOption for odd names."""
    path = local_path(source)
    local = path.exists() or path.name.endswith(_FILE_SUFFIXES) or not HUB_ID.fullmatch(str(source))
    return None if path.is_dir() or not local else path


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked. Raises InvalidData, also later if the file proves damaged."""
    try:
        with open_bytes(path) as file:
            unpacked: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            yield unpacked
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InvalidData(f"cannot read {path}: {reason}") from error


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield lines that are not blank; of a line that is too long, its beginning."""
    blank = 0
    for number in itertools.count(1):
        line = rest = file.readline(_MOST_LINE + 1)
        if not line:
            return
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_MOST_LINE)
        blank = 0 if line.strip() else blank + len(line)
        if blank > _MOST_LINE:
            raise InvalidData(f"{path}, line {number}: only blank lines for {blank} bytes")
        if not blank:
            yield f"line {number}", line


def _parse_json(content: bytes, label: str = "") -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason: object = error
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, character {error.pos + 1}"
        raise InvalidData(f"{label}is not JSON in UTF-8: {reason}") from error


def _data_set(name: str, file: Path | None = None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise InvalidData(
            f"{name} needs the package datasets, which is not installed. Give JSON lines, or "
            'run: pip install "selfspec[train]"'
        ) from error
    failures = (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        kind, data_file = (name, None) if file is None else (file.suffix[1:], str(file))
        data_set = datasets.load_dataset(kind, data_files=data_file, split="train")
    except failures as error:
        raise InvalidData(f"cannot read the data set {name}: {first_line(error)}") from error
    for number, row in enumerate(data_set, start=1):
        yield f"row {number}", row


def _record(row: Any) -> dict[str, Any]:
    if isinstance(row, bytes):
        if len(row) > _MOST_LINE:
            raise InvalidData(f"has more than {_MOST_LINE} bytes")
        row = _parse_json(row)
    if not isinstance(row, dict):
        raise InvalidData(f"holds {hint_name(type(row))}, expected an object")
    return row


# --- records


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> list[Conversation]:
    """The conversations of a record. Raises InvalidData with the reason.

    Several: a template drops thoughts of earlier turns, so each answer has its own context.
    """
    if "input_ids" in record:
        return [from_ids(record)]
    if tokenizer is None:
        raise InvalidData("holds no ids, and there is no tokenizer. Give input_ids")
    if "messages" in record or "conversations" in record:
        return _from_messages(messages_of(record), tokenizer)
    if "turns" in record:
        raise InvalidData("holds turns without answers. Write them: selfspec data --from FILE")
    if "text" in record:  # all tokens but the first count as an answer
        if not is_text(record["text"]):
            raise InvalidData("has a text that is no string of Unicode characters")
        ids = tuple(tokenizer(record["text"])["input_ids"])
        return [Conversation(ids, ((1, len(ids)),))]
    raise InvalidData(f"holds {', '.join(record) or 'nothing'}, expected {_EXPECTED}")


def messages_of(record: dict[str, Any]) -> list[Message]:
    """A record's turns with role and content. Raises InvalidData for unknown roles or no text."""
    keys = [name for name in ("messages", "conversations", "turns") if name in record]
    if not keys:
        raise InvalidData(
            f"holds {', '.join(record) or 'nothing'}, expected messages, conversations or turns"
        )
    key, turns = keys[0], record[keys[0]]
    if not isinstance(turns, list) or not turns:
        raise InvalidData(f"has {key} that are no list with at least one message")
    if key == "turns":
        turns = [{"role": "user", "content": text} for text in turns]
    role_key, text_key, roles = "role", "content", _ROLES
    if key == "conversations" and not (isinstance(turns[0], dict) and "role" in turns[0]):
        role_key, text_key, roles = "from", "value", _SHAREGPT_ROLES
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not is_text(turn.get(text_key)):
            raise InvalidData(f"has a message without text as its {text_key}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise InvalidData(f"has role {role!r}, expected {', '.join(roles)}")
        messages.append({"role": roles[role], "content": turn[text_key]})
    return messages


def user_turns(record: dict[str, Any]) -> tuple[str, ...]:
    """The user's turns in a row. Raises InvalidData if there are none, or one is empty."""
    if isinstance(record.get("text"), str) and "messages" not in record:
        record = {"turns": [record["text"]]}
    turns = [entry["content"].strip() for entry in messages_of(record) if entry["role"] == "user"]
    if not turns or not all(turns):
        raise InvalidData(f"has {'an empty' if turns else 'no'} user turn")
    return tuple(turns)


def questions_of(source: str | Path, *, skip_bad_rows: bool | None = None) -> list[tuple[str, ...]]:
    """Read the user's turns of each row. Raises InvalidData if there are none."""
    questions = list(reader := Reader(source, user_turns, skip_bad_rows=skip_bad_rows))
    reader.report()
    if not questions:
        raise InvalidData(f"{source} holds no questions")
    return questions


def texts_of(record: dict[str, Any]) -> str:
    """All texts of a row, whatever its fields are called."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from texts(entry)

    return "\n".join(texts(record))


def is_text(value: Any) -> bool:
    """Whether a value is text without lone surrogates, which JSON allows and tokenizers refuse."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")


def from_ids(record: dict[str, Any]) -> Conversation:
    """A record with `input_ids` and `answers`, [[first, end], ...], or `answer_start`.

    Raises InvalidData with the reason.
    """
    ids = record["input_ids"]
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise InvalidData("has input_ids that are no list of whole numbers")
    length, name = len(ids), "answers" if "answers" in record else "answer_start"
    answers: Any = record["answers"] if name == "answers" else [(record.get(name), length)]
    pairs = fits(answers, list[tuple[int, int]])
    places = [1, *(place for pair in answers for place in pair), length] if pairs else []
    if not pairs or places != sorted(places) or any(first == end for first, end in answers):
        bounds = "rising pairs [first, end] in 1..{}" if name == "answers" else "a place in 1..{}"
        raise InvalidData(f"has {name} {shown(record.get(name))}, expected {bounds.format(length)}")
    return Conversation(tuple(ids), tuple((first, end) for first, end in answers))


def _from_messages(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> list[Conversation]:
    """Messages through the chat template; every assistant turn is an answer.

    An answer follows what the template makes of the turns before it, as when it is generated. Some
    templates, such as DeepSeek-R1's, open its thoughts there and drop them from later prompts.
    """
    if tokenizer.chat_template is None:
        raise InvalidData(
            "holds messages, but the model has no chat template. "
            f"{advice(tokenizer.name_or_path)}; or give input_ids"
        )

    def text_of(count: int, *, add_prompt: bool = False) -> str:
        if not count:
            raise InvalidData("begins with the assistant, expected a user's turn first")
        return apply_template(tokenizer, messages[:count], add_generation_prompt=add_prompt)

    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    turn, eos = turn_end(tokenizer), tokenizer.eos_token or ""
    end_text = turn.text or (eos if turn.token is None else str(tokenizer.decode([turn.token])))
    stops = {tokenizer.eos_token_id, turn.token}
    talks = list[Conversation]()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answer = text_of(index, add_prompt=True), message["content"]
        prompt, ids = ids_of(asked), ids_of(text_of(index + 1))
        first = len(prompt)
        if ids[:first] != prompt:  # the answer as the model writes it
            opened = next(n for n in range(len(answer), -1, -1) if asked.endswith(answer[:n]))
            ids = (*prompt, *ids_of(answer[opened:] + end_text))
        # a model stops at its first end token, after which the template may have more
        places = range(first, len(ids))
        end = next((place + 1 for place in places if ids[place] in stops), len(ids))
        if not places:  # an answer without tokens is none
            continue
        _append(talks, Conversation(ids, ((first, end),)), {*tokenizer.all_special_ids})
    return talks or [Conversation(ids_of(text_of(len(messages))), ())]


def _append(talks: list[Conversation], talk: Conversation, special: Collection[int]) -> None:
    """Append a talk, or put it in place of the last one if it goes on from there."""
    if talks:
        before, pairs = talks[-1], zip(talks[-1].ids, talk.ids, strict=False)
        same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        # some templates end only the last turn
        if {*before.ids[same : before.answers[-1][1]]} <= {*special}:
            kept = ((start, min(end, same)) for start, end in before.answers if start < same)
            talk = Conversation(talk.ids, (*kept, *talk.answers))
            talks.pop()
    talks.append(talk)


# --- a file of rows that grows

FORMAT_VERSION = 4
"""2: one random generator per batch, not per row. 3: a batch's rows depended on the file."""

_MOST_BYTES = 1 << 30  # of a run's record, which holds the lines of a batch while they are written

DROPPED = {  # reasons to drop a row, and their words
    "duplicates": "duplicates",
    "alike": "answers nearly like earlier ones",
    "excluded": "rows with words of an excluded text",
    "unfinished": "user turns without an end",
    "empty": "empty ones",
    "too_long": "too long for the model",
    "bad_rows": "bad rows",
}

KEPT = ("rows", "tokens", "answers", "answer_tokens", "loops_cut")
"""Counts of rows in the file. `tokens` are all tokens of a row; `loops_cut` are answers that fell
into a loop and were cut after its first repetition."""


@dataclass
class Counts:
    """Counts of kept and dropped rows by family of the recipe; "" for other rows."""

    families: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, family: str, name: str, count: int = 1) -> None:
        """Count one of KEPT or DROPPED."""
        counts = self.families.setdefault(family, dict.fromkeys((*KEPT, *DROPPED), 0))
        counts[name] += count

    def add_row(self, record: Record) -> None:
        talk, loops = from_ids(record), record.get("loops", 0)
        values = (1, len(talk.ids), len(talk.answers), len(talk.answer_ids), loops)
        for name, value in zip(KEPT, values, strict=True):
            self.add(record.get("family", ""), name, value)

    def merge(self, other: Counts) -> None:
        for family, counts in other.families.items():
            for name, count in counts.items():
                self.add(family, name, count)

    def total(self, name: str) -> int:
        return sum(counts[name] for counts in self.families.values())

    def dropped(self) -> str:
        """The counts of dropped rows in all families, in words."""
        totals = {phrase: self.total(name) for name, phrase in DROPPED.items()}
        return ", ".join(f"{count:,} {phrase}" for phrase, count in totals.items() if count)

    def words(self) -> str:
        """All counts in words; reasons that did not occur are left out."""
        answers, loops, dropped = self.total("answers"), self.total("loops_cut"), self.dropped()
        text = (
            f"{self.total('rows'):,} conversations, {self.total('answer_tokens'):,} answer tokens, "
            f"{loops:,} of {answers:,} answers cut where they loop ({loops / max(1, answers):.0%})"
        )
        return f"{text}; dropped: {dropped}" if dropped else text


@dataclass(frozen=True, kw_only=True)
class _Run:
    format_version: int = FORMAT_VERSION
    made_by: str = "selfspec data"
    options: dict[str, Any]
    versions: dict[str, Any]
    counts: Counts = field(default_factory=Counts)
    seeds: list[int] = field(default_factory=list)  # of the batches that are written
    bytes: int = 0  # size of the whole batches in the file
    next: list[str] = field(default_factory=list)  # lines of the batch that is being written

    def __post_init__(self) -> None:
        families = self.counts.families.values()
        kinds = {*KEPT, *DROPPED}
        numbers = [self.bytes, *self.seeds, *(n for counts in families for n in counts.values())]
        if (
            self.format_version != FORMAT_VERSION
            or any(counts.keys() != kinds for counts in families)
            or not all(0 <= number < 2**63 for number in numbers)
        ):
            raise InvalidOption("it has another version, or its counts are wrong")


class Writer:
    """Appends batches of lines to a file, of which `run.json` records the whole batches."""

    def __init__(
        self, output: Path, options: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> None:
        """Raises InvalidOption for other options, InvalidData or CannotWrite for others' files."""
        self.output = check_output(output)
        self._record_path = _record_path(output)
        plain = json.loads(json.dumps(dict(options)))  # as JSON is read back: lists, no tuples
        self._run = _Run(options=plain, versions=dict(versions))
        if self._record_path.exists():
            self._resume()

    @property
    def batches(self) -> int:
        return len(self._run.seeds)

    @property
    def counts(self) -> Counts:
        """A copy of the counts of all batches so far."""
        return copy.deepcopy(self._run.counts)

    def append(self, lines: Sequence[str], seed: int, counts: Counts) -> None:
        """Add a batch. Raises CannotWrite if the disk is full; earlier batches stay whole."""
        block = self._block(lines)
        run = replace(
            self._run,
            seeds=[*self._run.seeds, seed],
            counts=copy.deepcopy(counts),
            bytes=self._run.bytes + len(block),
        )
        try:
            self._save(replace(self._run, next=list(lines)))
            files.append(self.output, block)
        except CannotWrite:
            with suppress(CannotWrite):
                self._save(self._run)
            raise
        self._save(run)  # until this is saved, `next` holds the last lines of the file
        self._run = run

    def records(self) -> Iterator[Record]:
        if self.batches:
            yield from Reader(self.output, lambda record: record)

    def _block(self, lines: Sequence[str]) -> bytes:
        block = "".join(f"{line}\n" for line in lines).encode()
        packed = block and self.output.suffix == ".gz"
        return gzip.compress(block, mtime=0) if packed else block  # gzip members may be joined

    def _save(self, run: _Run) -> None:
        files.write(self._record_path, json.dumps(asdict(run), indent=1) + "\n")

    def _resume(self) -> None:
        """Continue from the record, and cut off what a killed run wrote after it."""
        problem = f"{self._record_path} is no record of this version of selfspec data"
        with explain_errors(problem, f"Delete it and {self.output.name} to start over"):
            saved = record_of(_Run, read_json(self._record_path, _MOST_BYTES))
        versions, way_out = self._run.versions, f"remove it and {self._record_path.name}"
        require_same(self.output, saved.options, self._run.options, way_out)
        if changed := {k: v for k, v in versions.items() if saved.versions.get(k) != v}:
            logger.warning("%s was begun with other versions than %s", self.output, changed)
        files.append(self.output, b"")  # creates it: a run may be killed before that
        block = self._block(saved.next)
        with open_bytes(self.output) as file:
            size = file.seek(0, os.SEEK_END)
            if size < saved.bytes:
                raise InvalidData(
                    f"{self.output} has {size} bytes, its record says {saved.bytes}. Delete both "
                    "to start over"
                )
            file.seek(saved.bytes)
            added = file.read(len(block) + 1)
        if not block.startswith(added):
            raise InvalidData(
                f"{self.output}: what follows byte {saved.bytes} was not written by this run. Move "
                "it to a file of its own, or give another --output"
            )
        os.truncate(self.output, saved.bytes)
        self._run = replace(saved, next=[])


def check_output(output: str | Path, reads: Iterable[object] = ()) -> Path:
    """The path of a new file or of one that a Writer may continue. Raises CannotWrite."""
    path, record = Path(output), _record_path(output)
    files.refuse_inputs([path, record], reads)
    existing = [name for name in (path, record) if path.name and os.path.lexists(name)]
    if odd := [name for name in existing if name.is_symlink() or not name.is_file()]:
        raise CannotWrite(f"{odd[0]} is a link, a folder or a device. Name a file")
    if record in existing:
        return path
    if existing:
        raise CannotWrite(
            f"{path} exists, but no {record.name} to continue it by. Give another --output"
        )
    if path.suffix not in ("", ".jsonl", ".json", ".gz"):
        raise CannotWrite(f"{path} would hold lines of JSON. Name it {path.with_suffix('.jsonl')}")
    return files.check_file(output)


def template_of(output: str | Path) -> str | None:
    """The chat template that a Writer's file was written with, if not the model's own."""
    try:
        template = read_json(_record_path(local_path(output)))["options"]["chat_template"]
    except (InvalidData, LookupError, TypeError, ValueError):
        return None
    return template if isinstance(template, str) else None


def _record_path(output: str | Path) -> Path:
    return Path(f"{output}.run.json")
