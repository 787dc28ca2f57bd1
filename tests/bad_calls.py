"""A small speculator to call wrongly, and what an error has to say; for the tests of bad input."""

from __future__ import annotations

import re
from typing import Any

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import SelfspecError
from tests.api.test_text import byte_level_bpe
from tests.models import make_model

VOCAB = 280
TEMPLATE = (
    "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots\nplease') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
IDS = [5, 6, 7]


def small_model() -> Any:
    """With a vocabulary of bytes."""
    return make_model("llama", vocab_size=VOCAB, tie_word_embeddings=True)


def speaking(model: Any) -> Speculator:
    """With a tokenizer, a chat template that refuses robots, and heads."""
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    return wrap(model, tokenizer, heads="logit-lens", drafter="exit:layers=2/5,threshold=0.05")


def check(error: SelfspecError) -> None:
    """One line that says what was found and what to do."""
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 400
    assert re.search(
        r"expected|Did you mean|Known:|(\.|, or|:) ?(Give|Use|Leave|Shorten|Change|Check|Pad|Raise"
        r"|Lower|Remove|Make|Fit|Run|change|leave|go on)",
        text,
    ), text
