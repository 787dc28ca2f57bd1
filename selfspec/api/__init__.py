"""The Python API: load or wrap a model, then generate, stream or hold a conversation."""
