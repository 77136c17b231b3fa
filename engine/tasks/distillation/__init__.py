"""Distillation: a student learns the output distributions of a teacher."""
