"""Measuring: suites of prompts, methods side by side, losslessness, settings."""
