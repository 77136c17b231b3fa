"""Samples of unequal lengths, one after the other in a flat row."""
