"""The `selfspec` command: one module per command, each importing torch only when it runs."""
