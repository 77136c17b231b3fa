"""The processes of a job: their ranks, their start and end, and their process groups."""
