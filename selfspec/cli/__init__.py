"""The `selfspec` command. Its modules import torch only when a command runs."""

interrupts: list[None] = []
"""Ctrl-C that nothing has answered yet: a library that it stops while it is imported may swallow
it, or fail with any error some time later."""
