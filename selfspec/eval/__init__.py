"""Measuring: suites of prompts, methods side by side, losslessness, exact replay, settings."""
