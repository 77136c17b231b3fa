"""Divergences between the output distributions of two models."""
