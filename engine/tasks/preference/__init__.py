"""Preferences: a model learns which of two answers to a prompt is better."""
