"""Requests alone and in company: do token ids and the bits of logits stay?

    python -m eval.company --questions question_dev.jsonl --output eval/results/company

Each of 60 Spec-Bench questions is answered alone, without drafts, then in engines of at most 2, 7,
16 and 32 texts, with and without drafts: they come at random times, some are cancelled, long
prompts enter in pieces; some come twice, once to fail or to run out of time. What there is of any
is compared. Every third is sampled, with a seed. In float32 and bfloat16, from numbers
and from the blocks of the model's file. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import AcceptanceRule, Proposed, Target, Verdict
from selfspec.decoding.engine import Asked, Engine, Running
from selfspec.eval.results import load_suite, spread
from selfspec.eval.scripted import Listening


class Hashing:
    """An acceptance rule that hashes the target logits of every committed token."""

    lossless = True

    def __init__(self, rule: AcceptanceRule) -> None:
        self._rule = rule
        self.hashes: list[str] = []

    def verdict(
        self, ids: Tensor, target: Target, row: int, proposed: Sequence[Proposed]
    ) -> Verdict:
        """What the rule says."""
        logits = target.row(row)[0].contiguous().numpy()
        self.hashes.append(hashlib.blake2b(logits.data, digest_size=8).hexdigest())
        return self._rule.verdict(ids, target, row, proposed)


class Broken:
    """A processor that changes nothing, and raises at some token."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002  # the protocol's
        """The scores."""
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError
        return scores


_FAULTS: tuple[Callable[[], dict[str, Any]], ...] = (
    lambda: {"logits_processor": [Broken(after=7)]},
    lambda: {"max_time": 0.2},
)
"""What befalls a request that comes a second time."""


@dataclass
class Texts:
    """Requests of one model, and what each is alone."""

    speculator: Speculator
    prompts: Sequence[str]
    new_tokens: int

    def __post_init__(self) -> None:
        self.runtime = Listening(self.speculator.runtime, Hashing)
        self.alone = []
        for number in range(len(self.prompts)):
            running = Engine(self.runtime).add(self.asked(number), self.options(drafts=False))
            tokens = [token for entry in running for token in entry.tokens]
            self.alone.append((tokens, self.runtime.heard[-1].hashes))

    def asked(self, number: int, **more: Any) -> Asked:
        """The request, made anew."""
        options: Any = {"max_new_tokens": self.new_tokens, **more}
        if number % 3 == 0:
            options |= {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": number}
        else:
            options |= {"do_sample": False}
        return self.speculator.call(self.prompts[number], options).request.only()

    def options(self, *, drafts: bool) -> SpeculationOptions:
        """The default ones, which never cost time, also where that means few drafts."""
        return self.speculator.options.updated({"speculate": drafts})

    def differing(self, most: int, *, drafts: bool) -> dict[str, int]:
        """Texts, positions, and how many of both are not what they are alone."""
        dice = random.Random(most)
        engine = Engine(self.runtime, most=most, patience=1.0)
        left = list(range(len(self.prompts)))
        dice.shuffle(left)
        running: dict[Running, tuple[int, Hashing]] = {}
        cancelled = 0
        while left or engine.texts:
            for _ in range(min(len(left), dice.randrange(4))):
                number = left.pop()
                one = engine.add(self.asked(number), self.options(drafts=drafts))
                running[one] = number, self.runtime.heard[-1]
                for fault in (fault for fault in _FAULTS if dice.random() < 0.1):
                    twin = engine.add(self.asked(number, **fault()), self.options(drafts=drafts))
                    running[twin] = number, self.runtime.heard[-1]
            engine.step()
            if dice.random() < 0.05 and (going := [one for one in running if not one.ended]):
                dice.choice(going).close()
                cancelled += 1
        found = dict.fromkeys(("texts", "positions", "cancelled", "failed", "late"), 0)
        found |= {"cancelled": cancelled, "drafted": 0, "differing": 0}
        for one, (number, rule) in running.items():
            entries = list(one.fresh)
            found["failed"] += isinstance(one.error, ZeroDivisionError)
            found["late"] += bool(entries) and entries[-1].stop_reason == "stop"
            tokens, hashes = self.alone[number]
            same = [token for entry in entries for token in entry.tokens]
            found["texts"] += 1
            found["positions"] += len(same)
            found["drafted"] += sum(len(entry.draft_tokens) for entry in entries)
            pairs = zip(same, rule.hashes, tokens, hashes, strict=False)
            found["differing"] += sum(a != c or b != d for a, b, c, d in pairs)
        return found


def main(
    questions: Annotated[Path, typer.Option(help="Spec-Bench's question file.")],
    output: lab.Output,
    model: lab.Model = None,
    dtypes: Annotated[str, typer.Option(help="With commas.")] = "float32,bfloat16",
    requests: Annotated[int, typer.Option(min=1)] = 60,
    new_tokens: lab.NewTokens = 32,
    most: Annotated[str, typer.Option(help="Texts at once, with commas.")] = "2,7,16,32",
) -> None:
    """Compare, then write."""
    suite = spread(load_suite("spec-bench", questions), requests)
    prompts = [question.turns[0] for question in suite]
    found: list[dict[str, Any]] = []
    for dtype, numbers in product(dtypes.split(","), (False, True)):
        texts = Texts(lab.loaded(model, None, dtype, numbers=numbers), prompts, new_tokens)
        weights = "numbers" if numbers else "as in the file"
        for count, drafts in product(lab.counts(most), (False, True)):
            entry = {"dtype": dtype, "weights": weights, "most": count, "drafts": drafts}
            found.append(entry | texts.differing(count, drafts=drafts))
            print(found[-1], flush=True)
    table = lab.table(found[0], (entry.values() for entry in found))
    lab.finish(output, {"requests": len(prompts), "found": found}, table)


if __name__ == "__main__":
    lab.run(main)
