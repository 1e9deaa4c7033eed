"""The command line in this process."""

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from coram_hf.cli import main


class Run(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def coram_hf(*arguments, stdout=None):
    """The command line in this process, as `coram-hf` starts it; what it prints may go to a file instead."""
    printed, stderr = io.StringIO(), io.StringIO()
    stdout = stdout or printed
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["coram-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
    return Run(stop.value.code or 0, printed.getvalue(), stderr.getvalue())


def summary(printed):
    """The names and values of the table of facts that a command printed last."""
    table = re.split(r"^\S.*$", printed, flags=re.M)[-1]
    return dict(re.findall(r"^  (\S.*?) {2,}(\S.*?) *$", table, re.M))
