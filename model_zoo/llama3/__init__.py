"""Llama 3."""
