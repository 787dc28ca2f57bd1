"""Inspect and draw what each layer predicts for each token. Imports no drawing library itself."""
