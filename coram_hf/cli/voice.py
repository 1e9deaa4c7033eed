"""How much a command says: `-q`, `-v`, the levels of messages, and what other libraries print."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

OURS = "coram_hf"
QUIET_LIBRARIES = ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY")
"""Environment variables that libraries of Hugging Face read when they are imported."""
NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
"""The variable that turns off progress bars of transformers and downloads, which would flood a pipe."""
ONLY_OUR_BARS = "TQDM_DISABLE"
"""The variable that turns off bars by default: on a terminal, downloads and merges still show theirs."""
COLOURS = {logging.WARNING: "33", logging.ERROR: "31"}
"""ANSI codes for warnings and errors on a terminal."""

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Also print details, and messages and bars of other libraries."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")]


class Volume(NamedTuple):
    """Whether a run is quiet, verbose or for a program, by the options before and after the command."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False


NORMAL = Volume()
VOLUME: ContextVar[Volume] = ContextVar("volume", default=NORMAL)


class Voice(logging.Handler):
    """Prints messages on stderr as `coram-hf: warning: ...`, each only once and on a line of its own."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless it has been printed before."""
        message = " ".join(self.format(record).split())
        if message not in self._said:
            self._said.add(message)
            level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
            say(f"coram-hf: {level}{message}", COLOURS.get(record.levelno))


def say(text: str, colour: str | None = None) -> None:
    """Print a line on stderr, above a progress bar if there is one; coloured on a terminal only."""
    if colour is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[{colour}m{text}\033[0m"
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)


class OnlyErrors(logging.Handler):
    """Prints the errors of other libraries, and nothing else that they log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print an error that is not ours."""
        if record.levelno >= logging.ERROR and record.name.partition(".")[0] != OURS:
            print(f"{record.name}: {self.format(record)}", file=sys.stderr)


@contextmanager
def speaking(volume: Volume) -> Iterator[None]:
    """While a command runs, print its messages, and keep other libraries quiet unless it is verbose."""
    ours, level = logging.getLogger(OURS), logging.DEBUG if volume.verbose else logging.INFO
    handlers: dict[logging.Logger, logging.Handler] = {ours: Voice(logging.ERROR if volume.quiet else level)}
    if not volume.verbose:
        handlers[logging.getLogger()] = OnlyErrors()
    before, environment = (
        ours.level,
        {name: os.environ.get(name) for name in (*QUIET_LIBRARIES, NO_BARS, ONLY_OUR_BARS)},
    )
    ours.setLevel(level)
    for logger, handler in handlers.items():
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not volume.verbose:
                warnings.simplefilter("ignore")
                os.environ.setdefault(ONLY_OUR_BARS, "1")
                for name in QUIET_LIBRARIES:
                    os.environ.setdefault(name, "error")
            if volume.quiet or not sys.stderr.isatty():
                os.environ.setdefault(NO_BARS, "1")
            yield
    finally:
        ours.setLevel(before)
        for logger, handler in handlers.items():
            logger.removeHandler(handler)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)


def audible(command: Callable[..., None]) -> Callable[..., None]:
    """A command with `-q`, `-v` and, unless it has its own, `--json`; they may also come before its name."""

    @functools.wraps(command)
    def wrapped(*, quiet: bool, verbose: bool, **options: Any) -> None:
        before = VOLUME.get()
        json = before.json if "json" in own else options.pop("json") or before.json
        chosen = Volume(quiet or before.quiet, verbose or before.verbose, json)
        VOLUME.set(chosen)
        with speaking(chosen):
            try:
                command(**options)
            except Exception:
                if chosen.verbose:
                    traceback.print_exc()
                raise

    hints = get_type_hints(command, include_extras=True)
    own = {
        name: p.replace(kind=p.KEYWORD_ONLY, annotation=hints[name])
        for name, p in inspect.signature(command).parameters.items()
    }
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", Quiet), ("verbose", Verbose), ("json", Json))
        if name not in own
    ]
    signature = inspect.Signature([*own.values(), *more])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped
