"""Actions: what the buttons of the studio do, as values and HTML for the app to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coram_hf.demo.base import MODEL_ID
from coram_hf.errors import CoramError
from coram_hf.studio import writing
from coram_hf.studio.chat import Chat
from coram_hf.studio.job import Job
from coram_hf.studio.prompts import Example, demo_base, demo_examples, demo_experts, demo_prompts, pasted
from coram_hf.studio.roots import Roots
from coram_hf.studio.session import Session
from coram_hf.studio.views import answers_view, empty, note, page_view, plan_view, progress_view

TICK = 0.2
"""Seconds between two looks at a job."""
WIDEST = 2.5
"""The slider ends at this multiple of the merge's own lambda."""


class Actions:
    """One session with its chat; errors that a user can fix are shown, and all others are raised."""

    def __init__(self, roots: Roots) -> None:
        self.session = Session(roots)
        self.chat = Chat(self.session)
        self.own = 1.0

    def load_demo(self) -> tuple[str, list[str], str]:
        """The demo's base and experts as sources, and what to say."""
        root = self.session.roots.folders[0]
        words = "Five adapters of SmolLM2-135M: clock, initials, order, SQL, triage. Now inspect them."
        try:
            shown = str(demo_base(root).relative_to(root))
        except CoramError as error:
            shown, words = MODEL_ID, f"{error}; or inspect, which downloads {MODEL_ID} from the Hub."
        return shown, [f"{name}={path}" for name, path in demo_experts().items()], note(words)

    def inspect(self, base: str, experts: Sequence[str], line: str) -> str:
        """The plan, or the error."""

        def look() -> str:
            plan = self.session.inspect(base, experts, line)
            self.chat.clear()
            merger = self.session.merger
            assert merger is not None
            return plan_view(plan, merger.config.dispersion_threshold)

        return self.told(look)

    def merge(self, folder: str) -> Iterator[str]:
        """Merge, or resume a stopped merge, and show the bar until it ends."""
        session = self.session
        if session.job is not None and session.job.state == "stopped":
            session.job.resume()
            yield from self.follow(session.job)
            return
        yield from self._begin(lambda: session.start_merge(folder))

    def calibrate(self, text: str, granularity: str, one_line: bool) -> Iterator[str]:
        """Calibrate on pasted prompts, and show the bar until it ends."""
        yield from self._begin(lambda: self.session.start_calibration(text, granularity, one_line))

    def _begin(self, start: Callable[[], Job], ending: Callable[[str], str] = note) -> Iterator[str]:
        try:
            job = start()
        except CoramError as error:
            yield note(str(error), "error")
        else:
            yield from self.follow(job, ending)

    def follow(self, job: Job, ending: Callable[[str], str] = note) -> Iterator[str]:
        """The bar of a job while it runs, and its outcome."""
        while not job.wait(TICK) and job.state == "running":
            yield progress_view(job)
        if job.state == "stopped":
            yield progress_view(job)
        elif job.state == "dropped":
            yield note("Discarded. Nothing was changed.")
        elif job.error is not None:
            if not isinstance(job.error, CoramError | OSError):
                raise job.error
            yield note(writing.hidden(str(job.error)), "error")
        else:
            self.own = (self.session.report and self.session.report.lam) or 1.0
            yield ending(job.words)

    def stop(self) -> None:
        """Stop what is running, to be resumed."""
        if self.session.job is not None:
            self.session.job.stop()

    def discard(self) -> str:
        """Drop what is running or stopped."""
        self.session.discard()
        return note("Discarded. Nothing was changed.")

    def slide(self, lam: float | None, template: bool) -> tuple[str, str] | None:
        """Set lambda, and let the merge answer the last question again; None if lambda is what it was."""
        report = self.session.report
        if report is None or lam in (None, report.lam):
            return None

        def move() -> str:
            with self.session.lock:
                seconds = self.session.rescale(lam)
                self.chat.again(template)
            return f"Lambda {lam:.3g}, set in {seconds:.2f} s without merging again. Its own: {self.own:.3g}."

        return self.told(move, plain=True), answers_view(self.chat.turns)

    def ask(self, question: str, expert: str, template: bool) -> tuple[str, str]:
        """Ask all three models: what to say if it fails, and all answers so far."""
        right = next((e.right for e in self.examples() if e.prompt == question), "")

        def put() -> str:
            self.chat.ask(question, expert, template, right)
            return ""

        return self.told(put), answers_view(self.chat.turns)

    def examples(self) -> list[Example]:
        """Questions of the demo, if its experts are open."""
        return [example for example in demo_examples() if example.expert in self.experts()]

    def experts(self) -> list[str]:
        """The names of the experts that are open."""
        return [] if self.session.plan is None else list(self.session.plan.relative_updates)

    def ready_prompts(self) -> str:
        """The demo's prompts for its own experts, or the headings for others."""
        known = demo_prompts()
        return pasted({name: known.get(name, ["..."]) for name in self.experts()})

    def page(self) -> Iterator[str]:
        """Measure what the report needs, show the bar, and at last the page in its frame."""

        def work() -> str:
            return page_view(writing.report_page(self.session))

        yield from self._begin(lambda: self.session.start("Measuring", work), lambda words: words)

    def card(self) -> str:
        """The card, or nothing as long as there is no merge."""
        return writing.card_text(self.session) if self.session.report is not None else ""

    def save(self, folder: str, card: str, adapter: bool, overwrite: bool) -> str:
        """Save the merge, and say where."""
        return self.told(lambda: writing.save(self.session, folder, card, adapter, overwrite), plain=True)

    def push(self, repository: str, card: str, adapter: bool, private: bool) -> str:
        """Push the merge, and say where."""
        push = writing.push
        return self.told(
            lambda: f"Pushed: {push(self.session, repository, card, adapter, private)}", plain=True
        )

    def told(self, work: Callable[[], str], *, plain: bool = False) -> str:
        """What the work returns, as a note if it is `plain`; or an error of the user's, without a token."""
        try:
            found = work()
            return note(found) if plain else found
        except (CoramError, OSError) as error:
            return note(writing.hidden(" ".join(str(error).split())), "error")


def choices(roots: Roots) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Bases and experts to choose from, as labels and sources: those below the roots, and the demo's."""
    checkpoints, adapters = roots.models()
    demo = [(f"{name} (demo)", f"{name}={path}") for name, path in demo_experts().items()]
    found = [(shown, shown) for shown in (*adapters, *checkpoints)]
    return [(shown, shown) for shown in checkpoints], [*demo, *found]


NOTHING_YET = empty(
    "Nothing to see yet", "Choose a base and experts on the left, or load the demo, then inspect."
)
NO_CHAT = empty("No merge to talk to yet", "Merge first; then ask all three models the same question here.")
NO_PAGE = empty(
    "No report yet", "It shows where the experts moved, where they conflict, and what a merge keeps."
)
