"""Quantisation to fp8 by blocks."""
