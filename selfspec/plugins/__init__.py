"""Selfspec as a model for other tools; each module imports its tool."""
