"""The `selfspec` command. Its modules import torch only when a command runs."""
