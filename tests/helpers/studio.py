"""A walk through the studio in a browser, as a user takes it; each step may leave a screenshot."""

import time
from pathlib import Path

from PIL import Image

CONTROL = 2
WIDTH, HEIGHT = 1280, 860
PICTURE, MARGIN = (900, 840), 80
"""The window of a picture that is read in a README, and what is empty at its sides."""


class Walk:
    """Clicks through the tabs of the studio at an address; waits for what must appear."""

    def __init__(self, browser, address, shots=None, patience=30):
        self.browser, self.address, self.shots, self.patience = browser, address, shots, patience
        browser.look_like(WIDTH, HEIGHT)
        browser.open(address)
        self.seen("#demo", "Load the demo")

    def text(self, selector):
        return self.browser.run(f"document.querySelector('{selector}')?.innerText ?? ''")

    def seen(self, selector, words):
        """Wait until an element says something, and return all that it says."""
        script = f"(document.querySelector('{selector}')?.innerText ?? '').includes({words!r})"
        self.browser.until(script, self.patience)
        return self.text(selector)

    def tab(self, name):
        self.browser.click("button[role=tab]", name)

    def pick(self, field, source):
        """Click on one of the choices of a field."""
        self.browser.click(f"{field} input")
        options = f"[...document.querySelectorAll('{field} li[role=option]')]"
        option = f"{options}.find(e => e.innerText.replace('✓', '').trim() === '{source}')"
        self.browser.until(f"!!{option}", self.patience)
        self.browser.run(f"{option}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true}}))")
        self.browser.run("document.activeElement.blur()")
        parts = f"[...document.querySelectorAll('{field} input, {field} span')]"
        same = f"(e.value ?? e.innerText).trim() === '{source}'"
        self.browser.until(f"{parts}.some(e => !e.closest('li') && {same})", self.patience)

    def type(self, field, source):
        """Type something that is not among the choices of a field."""
        self.browser.write(f"{field} input", source)
        self.browser.press("Enter", 13)
        self.browser.run("document.activeElement.blur()")

    def load_demo(self):
        """Click until the page, which may still be coming alive, has asked the server for the demo."""
        while not any("/queue/join" in request for request in self.browser.requests):
            self.browser.click("#demo")
            time.sleep(0.5)
            self.text("#progress")
        self.seen("#progress", "Five adapters")

    def inspect(self):
        self.browser.click("#inspect")
        return self.seen("#plan", "dispersion D")

    def merge(self):
        self.browser.click("#merge")
        return self.seen("#progress", "Merged")

    def slide(self, lam):
        """Type a value of lambda, and wait until the merge has answered with it."""
        self.browser.write("#lambda input[type=number]", str(lam))
        self.answered_at(lam)

    def drag(self):
        """Press the mouse on the middle of lambda's track, and return the value that it got."""
        self.browser.click("#lambda input[type=range]")
        lam = float(self.browser.run("document.querySelector('#lambda input[type=range]').value"))
        self.answered_at(lam)
        return lam

    def widest(self):
        return float(self.browser.run("document.querySelector('#lambda input[type=range]').max"))

    def answered_at(self, lam):
        self.seen("#said", f"Lambda {lam:.3g},")
        self.seen("#answers .merge h4", f"lambda {lam:.3g}")

    def ask(self, question):
        self.fill("#question textarea", question)
        self.browser.click("#ask")
        self.browser.until("!!document.querySelector('#answers .answer.merge')", self.patience)
        return self.answers()

    def answers(self):
        """Base, expert and merge on the last question."""
        script = "[...document.querySelector('#answers .answers').querySelectorAll('.answer p')]"
        return self.browser.run(f"{script}.map(e => e.innerText)")

    def edit_card(self, words):
        """Type a last paragraph into the card."""
        self.browser.until("document.querySelector('#card .cm-content')?.innerText.includes('---')")

        def insert():
            self.browser.click("#card .cm-scroller")
            self.browser.press("End", 35, modifiers=CONTROL)
            self.browser.call("Input.insertText", text=f"\n{words}\n")

        self.until_kept(insert, f"document.querySelector('#card .cm-content').innerText.includes({words!r})")

    def fill(self, field, text):
        """Type into a field of a tab that may still be built."""
        kept = f"document.querySelector({field!r}).value === {text!r}"
        self.until_kept(lambda: self.browser.write(field, text), kept)

    def until_kept(self, write, kept):
        """Type until the page keeps it: an update that is still on its way from the server takes it back."""
        for _ in range(self.patience):
            write()
            time.sleep(0.6)
            if self.browser.run(kept):
                return
        raise AssertionError(f"never true: {kept}")

    def save(self, folder):
        self.fill("#folder textarea, #folder input", folder)
        return self.told("#save", "#saved")

    def push(self, repository):
        self.fill("#repository textarea, #repository input", repository)
        return self.told("#push", "#pushed")

    def told(self, button, place):
        """Click a button, and return the new note in its place."""
        before = self.text(f"{place} .note")
        self.browser.click(button)
        said = f"(document.querySelector('{place} .note')?.innerText ?? '')"
        self.browser.until(f"!['', {before!r}].includes({said})", self.patience)
        return self.text(f"{place} .note")

    def shot(self, name, size=PICTURE):
        """A screenshot of the top of the page without its margins, if any are wanted."""
        if self.shots is not None:
            width, height = size
            self.browser.look_like(*size)
            self.browser.run("window.scrollTo(0, 0)")
            time.sleep(0.8)
            path = Path(self.shots) / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            self.browser.screenshot(path, whole=False)
            Image.open(path).crop((MARGIN, 16, width - MARGIN, height)).save(path)
            self.browser.look_like(WIDTH, HEIGHT)
