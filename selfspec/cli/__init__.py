"""The `selfspec` command. Its modules import torch only when a command runs."""

interrupts: list[float] = []
"""When Ctrl-C came: a library that is interrupted while it is imported may swallow that, or fail
with any error some time later."""
