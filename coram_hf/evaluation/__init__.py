"""Scoring merged folders, sweeping lambda, and comparing methods, on tasks of ours or of lm-eval."""
