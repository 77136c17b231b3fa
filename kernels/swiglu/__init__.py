"""Gated feed-forward activation."""
