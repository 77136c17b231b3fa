"""Rows of tokens in the order of a routing plan, and back."""
