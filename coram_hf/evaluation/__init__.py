"""Scoring merged folders, sweeping lambda, and comparing methods, on .jsonl tasks or on tasks of lm-eval."""
