"""Drafters. `decode` knows only their protocol; options choose among them."""
