"""The life of a workspace: kept to be resumed, discarded, or published."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from coram_hf.errors import CoramError
from coram_hf.execution.files import FileRunner

logger = logging.getLogger("coram_hf")


@contextmanager
def workspace_of(runner: FileRunner, overwrite: bool) -> Iterator[bool]:
    """Lock the target, and create or resume its workspace; yields whether the merge was already finished.

    Only an error before the first byte is written discards the workspace. After that, the work done is kept
    and the same call resumes it, unless a model is in memory.
    """
    opened = False
    try:
        finished = runner.workspace.is_published(runner.state)
        if not finished:
            runner.check(overwrite)
        runner.processes.wait()
        if runner.processes.first:
            runner.workspace.lock()
            opened = True
            if finished:
                runner.clean()
            else:
                runner.workspace.open(runner.state)
        runner.processes.wait()
        yield finished
        opened = False
    except KeyboardInterrupt:
        logger.warning("stopped; %s", _fate(runner))
        opened &= runner.state is None
        raise
    except OSError as error:
        opened &= runner.state is None
        raise CoramError(f"{error}; {_fate(runner)}") from error
    except CoramError as error:
        if not runner.started:
            raise
        opened &= runner.state is None
        raise CoramError(f"{error}; {_fate(runner)}") from error
    except Exception:
        logger.error("the merge failed; %s", _fate(runner))
        opened &= runner.state is None
        raise
    finally:
        if opened:
            runner.workspace.discard()
        runner.workspace.unlock()


def _fate(runner: FileRunner) -> str:
    """A message about what happens to the unfinished work."""
    if runner.state is None:
        return "nothing is kept: a merge of in-memory models cannot be resumed"
    return f"run the same command again to resume ({runner.workspace.folder})"
