"""The `selfspec` command. Its modules import torch only when a command runs."""

interrupts: list[None] = []
"""Ctrl-C that nothing has handled yet: a library that it interrupts during its import may swallow
it, or fail later with any error."""
