"""The laboratory: experiments around selfspec, run from a clone as `python -m eval.NAME`."""
