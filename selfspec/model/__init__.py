"""A Hugging Face decoder split into parts: executors run rows through ranges of its layers."""
