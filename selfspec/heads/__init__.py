"""Exit heads: their modules, their files, and the judge that decides whether a token exits."""
