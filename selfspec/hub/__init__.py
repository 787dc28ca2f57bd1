"""From a model's name to its files, checked before anything reads them, and to the model."""
