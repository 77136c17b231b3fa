"""Monitors: numbers of training that are measured at an interval."""
