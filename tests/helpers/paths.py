"""Where the repository's files are."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
