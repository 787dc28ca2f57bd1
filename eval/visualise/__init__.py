"""Figures of the default heads over several prompts; README.md says how they were made."""
