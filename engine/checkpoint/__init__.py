"""Checkpoints: saved completely or not at all, verified, and read without running code."""
