"""The papers' experiments with the default model; README.md lists their commands."""
