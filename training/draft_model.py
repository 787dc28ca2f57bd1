r"""A draft model for `--draft-model`, cut from a larger model and fitted to text that it wrote.

    python training/draft_model.py --output draft-model \
        --data train.jsonl.gz --validation validation.jsonl.gz
    selfspec generate --draft-model draft-model --stats "Name three rivers."

Writes a folder that Hugging Face's `from_pretrained` reads, in bfloat16 (two layers of the default
model: 71 MB, most of it the embedding), and `fit.json` with the agreement before and after: the
share of held-out answer tokens that are its first choice. About ten minutes on one core.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from selfspec import files
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.errors import InvalidOption, SelfspecError
from selfspec.files import check_folder, replacing_folder
from selfspec.hub import models as hub
from selfspec.training import draft_model
from selfspec.training.data import read_conversations

BUILT_IN = draft_model.DraftFitOptions()


def main(
    output: Annotated[Path, typer.Option(help="Folder of the new model; must not be there.")],
    data: Annotated[Path, typer.Option(help="Conversations that the model wrote itself.")],
    validation: Annotated[Path, typer.Option(help="Others, to measure agreement on.")],
    model: str | None = None,
    layers: int = BUILT_IN.layers,
    steps: int = BUILT_IN.steps,
    batch_tokens: int = BUILT_IN.batch_tokens,
    learning_rate: float = BUILT_IN.learning_rate,
    seed: int = BUILT_IN.seed,
    validation_tokens: Annotated[int, typer.Option(help="Answer tokens to measure on.")] = 10_000,
) -> None:
    """Cut, fit, measure, write."""
    options = draft_model.DraftFitOptions(
        layers=layers,
        steps=steps,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        seed=seed,
    )
    check_folder(output, (), lambda _: False)
    if output.exists():
        raise InvalidOption(f"{output} is there already. Give another --output")
    files.check_folder(output, (), lambda _: False)
    whole, tokenizer, loaded_from = hub.load_model(model)
    limits = {
        "vocab_size": whole.get_output_embeddings().weight.shape[0],
        "max_length": batch_tokens,
        "skip_bad_rows": True,  # what is longer than a batch
    }
    held_out = read_conversations(validation, tokenizer, max_tokens=validation_tokens, **limits)
    talks = read_conversations(data, tokenizer, **limits)
    small = draft_model.cut(whole, layers)
    found: dict[str, Any] = {"command": command(), "base": loaded_from.label}
    found |= {"options": asdict(options), "machine": machine()}
    found["answer_tokens_held_out"] = sum(len(talk.answer_ids) for talk in held_out)
    found["agreement_before"] = draft_model.agreement(small, held_out, batch_tokens)
    with progress.bar("draft model", "steps") as show:
        draft_model.fit(small, talks, options, show)
    small = small.to(torch.bfloat16)
    found["agreement_after"] = draft_model.agreement(small, held_out, batch_tokens)
    with replacing_folder(output) as new:
        small.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "fit.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"agreement {found['agreement_before']:.1%} -> {found['agreement_after']:.1%}")


def command() -> str:
    """As it was given; of a path elsewhere only the name."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return shlex.join(["python", *words])


if __name__ == "__main__":
    try:
        typer.run(main)
    except SelfspecError as error:
        sys.exit(str(error))
