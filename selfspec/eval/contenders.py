"""Methods with their settings, ready to be measured side by side.

Comes in: names of METHODS and a speculator. Goes out: contenders, which write answers. Called by
`bench`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfspec.config import OPTION_NAMES
from selfspec.errors import InvalidOption
from selfspec.eval.methods import EXIT, METHODS, Setting, Written, fitted_layers, on_our_runtime
from selfspec.eval.sweeps import Moved
from selfspec.options.text import word
from selfspec.typed import check_keys

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation.streamers import BaseStreamer

    from selfspec.api.speculator import Speculator


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method with one of its settings."""

    label: str
    """As tables call it; those add that it is lossy."""
    method: str
    setting: Setting
    swept: Setting = field(default_factory=dict)
    """The option that a sweep moves, by its name there; empty for a method."""
    lossy: bool = False
    """Its rule changes the output."""

    def decode(
        self, speculator: Speculator, ids: Tensor, count: int, streamer: BaseStreamer
    ) -> Written:
        """Write `count` tokens behind ids [1, P], fewer if an end token ends the answer."""
        return METHODS[self.method].decode(speculator, ids, count, self.setting, streamer)

    @property
    def own_text(self) -> bool:
        """Its answers are not meant to be those of plain greedy decoding."""
        return self.lossy or bool(self.setting.get("do_sample"))


def candidates(speculator: Speculator, names: Sequence[str]) -> dict[str, list[Contender]]:
    """Each method with all its settings.

    Raises InvalidOption for unknown names, for methods that would be `speculation` itself and for
    settings that the heads do not allow; HeadsNotFound where heads are missing.
    """
    check_keys(names, METHODS, "method")
    found = {}
    for name in names:
        grid = METHODS[name].settings(speculator)
        if not grid:
            raise InvalidOption(
                f"{name} is the same as speculation with these heads and options. Leave it out of "
                "--methods"
            )
        found[name] = [_contender(speculator, name, setting) for setting in grid]
    return found


def swept(speculator: Speculator, moves: Sequence[Moved]) -> list[Contender]:
    """Speculation with some options moved, all others at their values.

    Raises InvalidOption for a value that the heads do not allow, HeadsNotFound without any where
    they are to draft.
    """
    options = speculator.options
    if any(options.updated(move.setting).uses("exit") for move in moves):
        fitted_layers(speculator)
    base = EXIT if moves and options.uses("exit") else {}
    return [
        _contender(speculator, "speculation", {**base, **move.setting}, {move.name: move.value})
        for move in moves
    ]


def described(
    methods: Sequence[Contender], grid: Mapping[str, Sequence[Contender]]
) -> dict[str, dict[str, Any]]:
    """By label, for the record: what each is, its setting, and out of which it was chosen."""
    return {
        entry.label: {
            "method": entry.method,
            "source": METHODS[entry.method].source,
            "setting": dict(entry.setting),
            "swept": dict(entry.swept),
            "lossy": entry.lossy,
            "chosen_from": [
                one.label for one in grid.get(entry.label, ()) if len(grid[entry.label]) > 1
            ],
        }
        for entry in methods
    }


def _contender(
    speculator: Speculator, name: str, setting: Setting, swept: Setting | None = None
) -> Contender:
    """`swept`: all that the label tells of a setting."""
    lossy = False
    if METHODS[name].decode is on_our_runtime:
        options = {"speculate": True, "do_sample": False, **setting}
        # what would fail on every prompt is raised here
        speculator.stream([0], max_new_tokens=1, **options).close()
        changed = {key: value for key, value in options.items() if key in OPTION_NAMES}
        effective = speculator.options.updated(changed)
        lossy = effective.speculate and effective.loss is not None
    words = ", ".join(f"{key}={word(value)}" for key, value in (swept or setting).items())
    return Contender(
        label=f"{name}({words})", method=name, setting=setting, swept=swept or {}, lossy=lossy
    )
