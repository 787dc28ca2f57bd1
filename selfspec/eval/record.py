"""What any exit setting would do on some prompts: made by `trace`, read by `replay` and `tune`.

A folder of two files, `record.json` (RecordInfo, prompts) and `record.safetensors` (arrays). Each
*place* of an answer has a root *node*: what every exit layer would draft behind the tokens up to
there. A draft that a setting may take leads to a child node, where drafting goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from selfspec import files
from selfspec.api.tuned import conditions
from selfspec.errors import HeadsMismatch, InvalidData, InvalidOption
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.options import Exit
from selfspec.typed import check_keys, require_types
from selfspec.untrusted import check_safetensors, read_json

FORMAT_VERSION = 3
INFO_FILE = "record.json"
ARRAYS_FILE = "record.safetensors"

GUESSES = 8
"""Of exit layer 0, for trees."""

NONE = -1
"""In place of a node: there is none."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """What was recorded, on what."""

    base_model: str
    """The model's name, for people."""
    base: str
    """Its fingerprint."""
    heads: str
    """Hash of the heads."""
    dtype: str
    executor: str
    num_layers: int
    exit_layers: tuple[int, ...]
    """Recorded ones: a column each in the arrays."""
    anneal_strengths: tuple[float, ...]
    """Alphas: the last axis of `confidence`."""
    min_threshold: float
    """Branches are followed down to this confidence, at the alpha where it is highest."""
    max_draft_tokens: int
    """Branches are followed for so many drafts."""
    end_tokens: tuple[int, ...]
    row_costs: tuple[float, ...]
    """What the model pays for a verification's second row, its third and so on, unless measured."""
    head_cost: float
    """What it pays for an exit head that is asked, likewise."""


@dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """One prompt and the length of its answer."""

    id: str
    """Of the question."""
    task: str
    turn: int
    """Of the question, from 1."""
    prompt_tokens: int
    new_tokens: int
    """Places: tokens of the answer, an end token included."""
    max_new_tokens: int
    """What was asked for; the answer is shorter if it ended by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Answers of plain decoding, and what exit layers would have drafted at each place.

    P prompts, T places (the answers of all prompts, one behind the other), N nodes, E exit layers,
    A alphas.
    """

    info: RecordInfo
    prompts: tuple[PromptInfo, ...]
    contexts: Ints
    """The tokens of all prompts, one prompt behind the other."""
    answers: Ints
    """[T] the tokens of plain decoding."""
    roots: Ints
    """[T] the node where the place's token is the newest; NONE where nothing can be drafted."""
    tokens: Ints
    """[N, E] the top-1 token of each exit layer."""
    confidence: Floats
    """[N, E, A] its probability after annealing."""
    children: Ints
    """[N, E] the node behind that token; NONE where no setting goes on."""
    guesses: Ints
    """[N, G] the best tokens of exit layer 0, for trees; G is 0 where it was not recorded."""
    chances: Floats
    """[N, A, G] their probabilities after annealing, falling."""
    behind: Ints
    """[N, G] the node behind each; NONE where no tree goes on."""

    def places(self, prompt: int) -> range:
        """The places of one prompt."""
        start = sum(entry.new_tokens for entry in self.prompts[:prompt])
        return range(start, start + self.prompts[prompt].new_tokens)

    def context(self, prompt: int) -> list[int]:
        """The tokens of one prompt."""
        start = sum(entry.prompt_tokens for entry in self.prompts[:prompt])
        stop = start + self.prompts[prompt].prompt_tokens
        found: list[int] = self.contexts[start:stop].tolist()
        return found

    @property
    def widest(self) -> int:
        """Rows of a verification at most, under settings that are tried on it."""
        chain = self.info.max_draft_tokens + 1
        return max(chain, Exit().max_rows) if self.guesses.shape[-1] else chain

    @property
    def mean_context(self) -> int:
        """Tokens in front of a place, on average."""
        contexts = (entry.prompt_tokens + entry.new_tokens / 2 for entry in self.prompts)
        return round(sum(contexts) / len(self.prompts))

    def require_heads(self, backbone: Backbone, heads: ExitHeads | None) -> None:
        """Raise HeadsMismatch if the record was made with another model, other heads or dtype."""
        found = conditions(backbone, heads)
        words = {"base": "model", "heads": "set of heads", "dtype": "dtype", "executor": "executor"}
        for name, word in words.items():
            recorded = getattr(self.info, name)
            if found[name] != recorded:
                raise HeadsMismatch(
                    f"the record was made with another {word} ({recorded[:12]}), "
                    f"found {found[name][:12]}. Record again: selfspec trace --record"
                )

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write a folder; one that is there has to be a record's. Raises CannotWrite."""
        check_free(folder, overwrite=overwrite)
        values = {
            "made_by": "selfspec",
            "format_version": FORMAT_VERSION,
            **asdict(self.info),
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        with files.replacing_folder(folder) as new:
            save_file(arrays, new / ARRAYS_FILE)
            (new / INFO_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Record:
        """From a folder. Raises InvalidData: file, reason."""
        path = folder / INFO_FILE
        try:
            values = read_json(path)
            values.pop("made_by", None)
            version = values.pop("format_version")
            if version != FORMAT_VERSION:
                raise InvalidData(f"has format version {version}, this reads {FORMAT_VERSION}")
            prompts = tuple(PromptInfo(**entry) for entry in values.pop("prompts"))
            info = _info(values)
            for read in (info, *prompts):
                require_types(read)
            path = folder / ARRAYS_FILE
            check_safetensors(path)
            arrays = load_file(path)
            _check_arrays(arrays, info, prompts)
        except OSError as error:
            raise InvalidData(f"cannot read {path}: {error.strerror or error}") from error
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            InvalidOption,
            InvalidData,
            SafetensorError,
        ) as error:
            raise InvalidData(f"{path} is no record: {error}. Make one: selfspec trace") from error
        return cls(info=info, prompts=prompts, **arrays)


def check_free(folder: str | Path, *, overwrite: bool) -> Path:
    """The folder. Raises CannotWrite unless a record may be written there."""

    def is_record(folder: Path) -> bool:
        names = {entry.name for entry in folder.iterdir()}
        return names <= {INFO_FILE, ARRAYS_FILE} and files.written_here(folder / INFO_FILE)

    folder = files.check_folder(folder, (), lambda _: False)
    there = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    return files.check_folder(folder, there, is_record, overwrite=overwrite)


_ARRAYS = {
    "contexts": np.int32,
    "answers": np.int32,
    "roots": np.int32,
    "tokens": np.int32,
    "confidence": np.float32,
    "children": np.int32,
    "guesses": np.int32,
    "chances": np.float32,
    "behind": np.int32,
}


def _info(values: Mapping[str, Any]) -> RecordInfo:
    """RecordInfo from JSON, whose lists are tuples here."""
    check_keys(values, (entry.name for entry in fields(RecordInfo)), "key")
    typed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return RecordInfo(**typed)


def _check_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], info: RecordInfo, prompts: tuple[PromptInfo, ...]
) -> None:
    """Raise InvalidData for missing arrays, other shapes, and nodes that do not exist."""
    places = sum(prompt.new_tokens for prompt in prompts)
    count = len(arrays["tokens"])
    layers, alphas = len(info.exit_layers), len(info.anneal_strengths)
    known = arrays.get("guesses")
    guesses = 0 if known is None or known.ndim != 2 else known.shape[1]
    shapes = {
        "contexts": (sum(prompt.prompt_tokens for prompt in prompts),),
        "answers": (places,),
        "roots": (places,),
        "tokens": (count, layers),
        "confidence": (count, layers, alphas),
        "children": (count, layers),
        "guesses": (count, guesses),
        "chances": (count, alphas, guesses),
        "behind": (count, guesses),
    }
    if arrays.keys() != shapes.keys():
        raise InvalidData(f"holds {sorted(arrays)}, expected {sorted(shapes)}")
    for name, shape in shapes.items():
        found = arrays[name]
        if found.shape != shape or found.dtype != _ARRAYS[name]:
            raise InvalidData(
                f"{name} is {found.dtype} {list(found.shape)}, expected {list(shape)}"
            )
    for name in ("roots", "children", "behind"):
        nodes = arrays[name]
        if nodes.size and not (nodes.min() >= NONE and nodes.max() < count):
            raise InvalidData(f"{name} names a node that is not there")
