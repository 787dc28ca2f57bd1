"""Error classes, one for each problem that a caller can act on; checks of names and types.

Every message is one line: what was found, what was expected, what to do. The command line prints
it and exits with code 2; nothing else in the package prints errors. Values are checked against the
type annotations of options and of records in files; `options` then checks ranges. No torch.
"""

from __future__ import annotations

import difflib
import functools
import math
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from importlib.util import find_spec
from itertools import takewhile
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_OURS = str(Path(__file__).parent)
_Kind = TypeVar("_Kind")
_LONGEST = 1900  # characters in a message


class SelfspecError(Exception):
    """Base of all errors that selfspec raises on purpose: one line, of a bounded length."""

    def __init__(self, message: str = "") -> None:
        """Cut the middle of a long message: a library's error may repeat any contents of a file."""
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:1200]} … {line[-600:]}")

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows: the caller's own frames and the message."""
        frames = traceback.extract_tb(self.__traceback__)
        callers = takewhile(lambda frame: not frame.filename.startswith(_OURS), frames)
        stack = [frame for frame in callers if "IPython" not in Path(frame.filename).parts]
        lines = "".join(traceback.format_list(stack)).splitlines()
        return [*lines, f"{type(self).__name__}: {self}"]


class ModelNotFound(SelfspecError):
    """The given name, folder or file holds no model that can be loaded."""


class UnsupportedModel(SelfspecError):
    """The model cannot be split into segments that give exactly the model's own results."""


class ModelChanged(SelfspecError):
    """The model's weights, modules or hooks have changed since it was wrapped."""


class HeadsNotFound(SelfspecError):
    """There are no exit heads under the given name or in the given folder."""


class InvalidHeads(SelfspecError):
    """A heads folder is incomplete, damaged or in a format that this version does not read."""


class HeadsMismatch(SelfspecError):
    """The exit heads were fitted to another model."""


class DraftModelMismatch(SelfspecError):
    """The draft model and the model have different vocabularies."""


class InvalidOption(SelfspecError):
    """An option is unknown, out of range, or contradicts another one."""


class InvalidPrompt(SelfspecError):
    """The prompt is empty, too long for the model, or holds ids outside its vocabulary."""


class InvalidDraft(SelfspecError):
    """A drafter broke its contract: it gave too many drafts, or none where it promised some."""


class InvalidData(SelfspecError):
    """A data file cannot be used; the message names the file, the line and the reason."""


class LacksWeights(InvalidData):
    """A model's files lack the tensors of some of its weights."""


class PinnedUnavailable(SelfspecError):
    """Bitwise draft invariance was requested, but the probe found that it does not hold here."""


class CannotWrite(SelfspecError):
    """An output cannot be written, or would replace a file that selfspec did not write."""


def first_line(error: BaseException) -> str:
    """The message of another library's error, on one line."""
    lines = str(error).split("\n") if str(error).strip() else [type(error).__name__]
    texts = [line.strip() for line in lines if line.strip()]
    return " ".join(texts[: 2 if texts[0].endswith(":") else 1]).rstrip(" .:")


# --- values, names and types

_SHOWN = 60  # characters of a value that an error repeats
_MOST_LISTED = 40  # known names that an error lists

_WORDS: dict[Any, tuple[str, str]] = {  # a type's name in messages: singular and plural
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("text", "texts"),
    dict: ("names and values", "names and values"),
    Mapping: ("names and values", "names and values"),
    types.NoneType: ("None", "None"),
    Callable: ("a function", "functions"),
    Any: ("a value", "values"),
}

# a hint's origin and arguments: kept, as long lists in files ask for them at every entry
_members: Callable[[Any], Any] = functools.cache(lambda it: (get_origin(it) or it, get_args(it)))

_TORCH_CLASSES = dict.fromkeys(("Tensor", "GenerationConfig", "BaseStreamer"), Any)
"""Names in annotations that need torch: the code that uses such a value checks it."""

annotations_of: Callable[..., dict[str, Any]] = functools.cache(
    functools.partial(get_type_hints, localns=_TORCH_CLASSES)
)
"""Type hints of a class of options, with torch's classes as Any; `include_extras` adds ranges."""


def check_keys(values: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Raise InvalidOption at the first of `values` not in `known`, naming the nearest known one."""
    names = sorted(known)
    for key in values:
        if key in names:
            continue
        # suggest names that begin with the key, else the most similar name
        matches = [name for name in names if len(key) > 2 and name.startswith(f"{key}_")]
        matches = matches or difflib.get_close_matches(key, names, n=1, cutoff=0.7)
        hint = f"Did you mean {' or '.join(matches)}?" if matches else f"Known: {', '.join(names)}"
        if not matches and len(names) > _MOST_LISTED:
            hint = "Leave it out: no known name is like it"
        raise InvalidOption(f"unknown {kind} {key!r}. {hint}")


def check_packages(work: str, *modules: str, extra: str = "eval") -> None:
    """Raise InvalidOption if a module that `work` needs is missing; call it before that work."""
    for name in modules:
        if find_spec(name) is None:
            raise InvalidOption(f"{work} needs {name}: pip install 'selfspec[{extra}]'")


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = "") -> None:
    """Raise InvalidOption, with `prefix`, at the first value that does not fit its type hint."""
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            expected = hint_name(hints[name])
            raise InvalidOption(f"{prefix}{name} is {shown(value)}, expected {expected}")


def record_of(kind: type[_Kind], values: Any) -> _Kind:
    """Make a dataclass from a file's values. Raises InvalidOption naming the first wrong entry."""
    if not isinstance(values, dict):
        raise InvalidOption(f"it is {shown(values)}, expected a mapping")
    hints = annotations_of(kind)
    check_keys(values, hints, "entry")
    entries = {name: _as_hinted(value, hints[name]) for name, value in values.items()}
    check_types(entries, hints)
    try:
        return kind(**entries)
    except TypeError as error:  # an entry is missing
        raise InvalidOption(first_line(error).partition("() ")[2]) from error


def _as_hinted(value: Any, hint: Any) -> Any:
    """Turn mappings and lists from a file into a hint's records and tuples, at any depth."""
    origin, inner = _members(hint)
    if origin in (Union, types.UnionType) and value is not None:
        return _as_hinted(value, inner[0])
    if isinstance(hint, type) and is_dataclass(hint):
        return value if isinstance(value, hint) else record_of(hint, value)
    if isinstance(value, list) and inner:
        entries = [one if type(one) is inner[0] else _as_hinted(one, inner[0]) for one in value]
        return tuple(entries) if origin is tuple else entries
    if isinstance(value, dict) and inner:
        return {key: _as_hinted(entry, inner[-1]) for key, entry in value.items()}
    return value


def require_same(
    place: str | Path, old_options: Mapping[str, Any], new_options: Mapping[str, Any], way_out: str
) -> None:
    """Raise InvalidOption naming the first option that differs from the run begun at `place`."""
    names = old_options.keys() | new_options.keys()
    for name in sorted(names, key=lambda name: (name == "fingerprint", name)):  # last: least useful
        old, new = old_options.get(name), new_options.get(name)
        if old != new:
            option = f"{name} {old}, not {new}"
            option = option if len(option) <= 100 else f"another {name}"
            raise InvalidOption(
                f"{place} was begun with {option}. Give the same options to go on, another "
                f"--output, or {way_out}"
            )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a hint: a bool is no number, numbers are finite, lists may be tuples."""
    if type(value) is hint:  # soon decided, as files hold long lists
        return hint is not float or math.isfinite(value)
    origin, inner = _members(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if origin in (Literal, Callable):
        return value in inner if origin is Literal else callable(value)
    if origin in (int, float):
        kind = Integral if origin is int else Real
        try:
            return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        except OverflowError:  # an int too large for a float
            return origin is int
    if hint is Any or origin is str or not issubclass(origin, Collection):
        return hint is Any or isinstance(value, origin)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and (
            not inner or all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
        )
    if not isinstance(value, list | tuple):
        return False
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return not inner or all(fits(entry, inner[0]) for entry in value)


def hint_name(hint: Any) -> str:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType, Literal):
        return " or ".join(map(str if origin is Literal else hint_name, inner))
    if origin in (list, tuple):
        kinds = dict.fromkeys(entry for entry in inner if entry is not Ellipsis)
        plurals = [_WORDS.get(kind, (hint_name(kind),) * 2)[1] for kind in kinds]
        return f"a list of {' and '.join(plurals)}" if plurals else "a list"
    return _WORDS.get(origin, (f"a {getattr(hint, '__name__', hint)}",) * 2)[0]


def shown(value: object) -> str:
    """The repr of a value for an error message: on one line, cut if long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # any class may come here, with a repr that fails
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."
