"""Processes: who they are, how they start, stop and meet."""
