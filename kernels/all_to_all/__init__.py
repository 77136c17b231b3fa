"""Rows exchanged between ranks, any number from each to each."""
