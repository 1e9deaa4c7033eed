"""Merge methods: CORAM, the baselines it is compared with, and their common protocol."""
