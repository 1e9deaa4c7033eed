"""The command line on a slow disk, which prints how many bytes it has written, and can be interrupted.

    python -m helpers.slow_command merge BASE EXPERT... -o FOLDER

A shell that runs jobs in the background starts them with Ctrl-C ignored; here it counts again.
"""

import signal
import sys

from helpers.disks import slow

from coram_hf.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[0] = "coram-hf"
    with slow(2e5, lambda written: print(written, flush=True)):
        main()
