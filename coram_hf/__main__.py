"""`python -m coram_hf` is `coram-hf`."""

from coram_hf.cli import main

main()
