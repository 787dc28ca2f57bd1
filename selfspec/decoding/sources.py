"""Who drafts: the names that records, statistics and prices share. Imports nothing."""

from __future__ import annotations

EXIT, NGRAM, DRAFT_MODEL, GRAMMAR = "exit", "ngram", "draft-model", "grammar"

MODEL = "model"
"""The source of tokens that no drafter gave: a verification did, or the prompt's pass."""

FREE = frozenset({NGRAM, GRAMMAR})
"""Drafts of these take no work before their verification."""
