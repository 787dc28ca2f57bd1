"""Fitting exit heads: conversations in, a heads folder out. The runtime never imports this."""
