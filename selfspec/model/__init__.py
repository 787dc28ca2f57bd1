"""A Hugging Face decoder cut open: rows run through ranges of its layers, by several executors."""
