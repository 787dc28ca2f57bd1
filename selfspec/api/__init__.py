"""What a program calls: load or wrap a model, then generate, stream or converse."""
