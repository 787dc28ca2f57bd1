"""What can go wrong, one class per thing the caller can act on.

Every message is one line: what was found, what was expected, what to do. The command line prints
it and exits with code 2; nothing else in the package prints errors.
"""

from __future__ import annotations

import traceback
from itertools import takewhile
from pathlib import Path

_OURS = str(Path(__file__).parent)
_LONGEST = 1900  # characters of a message


class SelfspecError(Exception):
    """Base of all errors that selfspec raises on purpose: one line, of a bounded length."""

    def __init__(self, message: str = "") -> None:
        """What libraries say of a file may repeat any of its contents: the middle is left out."""
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:1200]} … {line[-600:]}")

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the caller's own lines, and the sentence."""
        frames = traceback.extract_tb(self.__traceback__)
        own = takewhile(lambda frame: not frame.filename.startswith(_OURS), frames)
        shown = [frame for frame in own if "IPython" not in Path(frame.filename).parts]
        lines = "".join(traceback.format_list(shown)).splitlines()
        return [*lines, f"{type(self).__name__}: {self}"]


class ModelNotFound(SelfspecError):
    """No model can be loaded from the given name, folder or file."""


class UnsupportedModel(SelfspecError):
    """The model cannot be cut into segments with exactly its own results."""


class ModelChanged(SelfspecError):
    """The model's weights, modules or hooks are not those that were wrapped."""


class HeadsNotFound(SelfspecError):
    """No exit heads can be found under the given name or folder."""


class InvalidHeads(SelfspecError):
    """A heads folder is incomplete, damaged or of a format this version does not read."""


class HeadsMismatch(SelfspecError):
    """The exit heads were fitted to another model."""


class DraftModelMismatch(SelfspecError):
    """The draft model has another vocabulary than the model."""


class InvalidOption(SelfspecError):
    """An option is unknown, out of range, or contradicts another one."""


class InvalidPrompt(SelfspecError):
    """The prompt is empty, too long for the model, or holds ids outside its vocabulary."""


class InvalidDraft(SelfspecError):
    """A drafter broke its contract: more drafts than allowed, or none where some were promised."""


class InvalidData(SelfspecError):
    """A data file cannot be used: names the file, the line and the reason."""


class LacksWeights(InvalidData):
    """The files of a model hold no tensor for some of its weights."""


class PinnedUnavailable(SelfspecError):
    """Bitwise draft invariance was asked for and the probe found it does not hold here."""


class CannotWrite(SelfspecError):
    """An output cannot be written, or would replace what selfspec did not write."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, on one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(" .:")
