"""Selfspec as a model of other tools; each module imports the tool that it is for."""
