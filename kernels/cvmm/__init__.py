"""Conditional vector-matrix products: each row times the matrix that it selected."""
