"""Mixtral."""
