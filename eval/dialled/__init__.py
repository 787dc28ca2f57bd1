"""The regime of large models, dialled in with a model that answers early by construction."""
