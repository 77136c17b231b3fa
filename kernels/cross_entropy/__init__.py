"""Cross entropy of a projection."""
