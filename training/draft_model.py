r"""Makes a draft model for `--draft-model`: cut from a larger model, fitted to text that it wrote.

    python training/draft_model.py --output draft-model \
        --data train.jsonl.gz --validation validation.jsonl.gz
    selfspec generate --draft-model draft-model --stats "Name three rivers."

Writes a folder that Hugging Face's `from_pretrained` reads, in bfloat16 (two layers of the default
model: 71 MB, most of it the embedding), and `fit.json` with the agreement before and after: the
share of held-out answer tokens that are its first choice. About ten minutes on one core.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.cli.base import bar
from selfspec.errors import InvalidOption, SelfspecError
from selfspec.files import check_folder, replacing_folder
from selfspec.hub import models as hub
from selfspec.training.features import Batch, pad_batch, plan_batches
from selfspec.training.text import Conversation, read_conversations

_WARM_UP = 0.1
"""Share of the steps over which the learning rate rises; then a cosine to 0."""


_MAX_GRAD_NORM = 1.0


def main(
    output: Annotated[Path, typer.Option(help="Folder of the new model; must not exist.")],
    data: Annotated[Path, typer.Option(help="Conversations that the model wrote itself.")],
    validation: Annotated[Path, typer.Option(help="Others, to measure agreement on.")],
    model: str | None = None,
    layers: Annotated[int, typer.Option(help="First layers to keep.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimiser steps; 0 only cuts the model.")] = 240,
    batch_tokens: Annotated[int, typer.Option(help="Most tokens of a step, with padding.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Fixes the order of the batches.")] = 0,
    validation_tokens: Annotated[int, typer.Option(help="Answer tokens to measure on.")] = 10_000,
) -> None:
    """Cut, fit, measure, write."""
    options = {
        "layers": layers,
        "steps": steps,
        "batch_tokens": batch_tokens,
        "learning_rate": learning_rate,
        "max_grad_norm": _MAX_GRAD_NORM,
        "seed": seed,
    }
    check_folder(output, (), lambda _: False)
    if output.exists():
        raise InvalidOption(f"{output} is there already. Give another --output")
    whole, tokenizer, loaded_from = hub.load_model(model)
    limits = {
        "vocab_size": whole.get_output_embeddings().weight.shape[0],
        "max_length": batch_tokens,
        "skip_bad_rows": True,  # those longer than a batch
    }
    held_out = read_conversations(validation, tokenizer, max_tokens=validation_tokens, **limits)
    talks = read_conversations(data, tokenizer, **limits)
    small = cut(whole, layers)
    found: dict[str, Any] = {"command": command(), "base": loaded_from.label}
    found |= {"options": options, "machine": hub.machine()}
    found["answer_tokens_held_out"] = sum(len(talk.answer_ids) for talk in held_out)
    found["agreement_before"] = agreement(small, held_out, batch_tokens)
    with bar("draft model", "steps") as show:
        batches = _endless(plan_batches(talks, batch_tokens), seed)
        fit(small, batches, steps=steps, learning_rate=learning_rate, progress=show)
    small = small.bfloat16()
    found["agreement_after"] = agreement(small, held_out, batch_tokens)
    with replacing_folder(output) as new:
        small.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "fit.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"agreement {found['agreement_before']:.1%} -> {found['agreement_after']:.1%}")


def command() -> str:
    """The command line; absolute paths become names."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return shlex.join(["python", *words])


def cut(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The first `layers` layers with embeddings, last norm and unembedding: a copy, in float32.

    Raises InvalidOption for a number of layers that makes no smaller model.
    """
    config = copy.deepcopy(model.config)
    inner = config.get_text_config(decoder=True)
    depth = inner.num_hidden_layers
    if not 1 <= layers < depth:
        raise InvalidOption(f"layers is {layers}, expected 1..{depth - 1}: the model has {depth}")
    inner.num_hidden_layers = layers
    if getattr(inner, "layer_types", None):
        inner.layer_types = inner.layer_types[:layers]
    small: PreTrainedModel = nn.Module.to(type(model)(config), torch.float32)
    whole = model.state_dict()
    small.load_state_dict({name: whole[name] for name in small.state_dict()})
    small.generation_config = copy.deepcopy(model.generation_config)
    # Module.to, because the model's own is wrapped and loses its type
    nn.Module.to(small, model.device).eval()
    return small


def fit(
    model: PreTrainedModel,
    batches: Iterator[Sequence[Conversation]],
    *,
    steps: int,
    learning_rate: float,
    progress: Callable[[int, int, str], None],
) -> None:
    """Teach `model` the next token of every answer, in place; `progress` hears of each step.

    Text that the large model wrote greedily is what drafts must hit, so its tokens are the targets.
    Raises SelfspecError when a loss is not finite.
    """
    learning = _unfrozen(model)
    optimizer = torch.optim.AdamW(learning, lr=learning_rate)
    model.train()
    try:
        for number, group in enumerate(itertools.islice(batches, steps)):
            for learned in optimizer.param_groups:
                learned["lr"] = learning_rate * _rate(number, steps)
            loss = F.cross_entropy(*_predicted(model, pad_batch(group)))  # mean, in nats
            if not math.isfinite(loss.item()):
                raise SelfspecError(f"the loss is {loss.item()} at step {number + 1}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learning, _MAX_GRAD_NORM)
            optimizer.step()
            progress(number + 1, steps, f"loss {loss.item():.2f}")
    finally:
        model.requires_grad_(True).eval()


@torch.inference_mode()
def agreement(
    model: PreTrainedModel, conversations: Sequence[Conversation], batch_tokens: int
) -> float:
    """Share of answer tokens, 0..1, that are the model's first choice after the text before."""
    right = total = 0
    for group in plan_batches(conversations, batch_tokens):
        logits, tokens = _predicted(model, pad_batch(group))
        right += int((logits.argmax(-1) == tokens).sum())
        total += len(tokens)
    return right / total


def _unfrozen(model: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters to train: all but the embedding and the unembedding, tied or not."""
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _predicted(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [N, V] that predict the N answer tokens of a batch, and the tokens [N].

    Rows without an answer token are not unembedded: that is most of the work.
    """
    ids, predicts = batch.ids.to(model.device), batch.predicts.to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    unembed = model.get_output_embeddings()
    return unembed(hidden[predicts]).float(), ids.roll(-1, dims=1)[predicts]


def _endless(plan: Sequence[Sequence[Conversation]], seed: int) -> Iterator[Sequence[Conversation]]:
    """Yield all batches in random order, repeatedly."""
    shuffle = random.Random(seed)  # an order of work, no secret
    for _ in itertools.count():
        yield from shuffle.sample(plan, len(plan))


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate at `step`, from 0."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


if __name__ == "__main__":
    try:
        typer.run(main)
    except SelfspecError as error:
        sys.exit(str(error))
