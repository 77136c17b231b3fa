"""Llama 4, its text model."""
