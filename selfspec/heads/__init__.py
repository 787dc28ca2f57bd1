"""Exit heads: what they are, how they are kept, and who decides whether a token exits."""
