"""Headless Chromium over its debugging pipe, with nothing but the standard library."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]


class Browser:
    """One page of a browser: what it asked the network for, and what it complained about."""

    def __enter__(self):
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        ours, theirs = os.pipe(), os.pipe()

        def wire():
            a, b = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank"],
            close_fds=False,
            preexec_fn=wire,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read, self._buffer, self._count = ours[1], theirs[0], b"", 0
        self.events, self._session = [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self._write)
        os.close(self._read)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        finally:
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def _receive(self, seconds=60):
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("chromium does not answer")
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def look_like(self, width, height=900, scheme="light"):
        """A window of this size, on a device with this colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address):
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, script):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script, seconds=60):
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"still not true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def click(self, selector, text=""):
        """Click into the middle of the first visible element with the selector that contains the text."""
        find = f"""[...document.querySelectorAll({json.dumps(selector)})].find(
            e => e.offsetParent && e.textContent.includes({json.dumps(text)}))"""
        self.until(f"!!({find})")
        script = "(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        x, y = self.run(f"{script} return [r.x + r.width / 2, r.y + r.height / 2] }})({find})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, code, **options):
        """Press a key that is no character."""
        options |= {"key": key, "code": key, "windowsVirtualKeyCode": code}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **options)

    def write(self, selector, text):
        """Click into a field, and type in place of what it contains."""
        self.click(selector)
        self.run("document.activeElement.select && document.activeElement.select()")
        self.call("Input.insertText", text=text)

    def screenshot(self, path, whole=True):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip} if whole else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    @property
    def complaints(self):
        """Errors and messages on the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    @property
    def requests(self):
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
