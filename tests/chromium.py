"""Headless Chromium over the DevTools protocol, through a pair of pipes: needs no other package.

Protocol: ``--remote-debugging-pipe`` reads JSON messages that end in a zero byte from file
descriptor 3 and writes such messages to 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 30.0
"""Seconds to wait for an answer."""


def find() -> str | None:
    """The browser's program: ``$CHROMIUM``, or the first of the usual names."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser said no, or nothing."""


class Browser:
    """One running browser."""

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self._process = process
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(PATIENCE)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _receive(self, patience: float) -> dict[str, Any]:
        end = time.monotonic() + patience
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise BrowserError(f"no answer; exit status {self._process.poll()}")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """A tab that shows the file."""
        tab = Tab(self)
        tab.size(width, height)
        scheme = "dark" if dark else "light"
        tab.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        tab.go(path)
        return tab


class Tab:
    """One page. Coordinates are CSS pixels of the window."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command for this page."""
        return self._browser.call(method, self._session, **parameters)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Make the window this large."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def go(self, path: Path) -> None:
        """Load a file, to the end of its scripts and the next two frames."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        self.frames()

    def frames(self) -> None:
        """Let two frames be drawn."""
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )

    def run(self, script: str) -> Any:
        """The value of an expression (awaited) in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            if time.monotonic() > end:
                raise BrowserError(f"never true: {condition}")
            time.sleep(0.02)

    # ---- what a person does

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        """One mouse event: ``Moved``, ``Pressed``, ``Released`` or ``Wheel``."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **parameters)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self.mouse("Moved", x, y)
        self.frames()

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Click the left button ``count`` times."""
        self.mouse("Moved", x, y)
        for number in range(1, count + 1):
            self.mouse("Pressed", x, y, button="left", clickCount=number)
            self.mouse("Released", x, y, button="left", clickCount=number)
        self.frames()

    def drag(
        self, start: tuple[float, float], end: tuple[float, float], shift: bool = False
    ) -> None:
        """Press at ``start``, move to ``end`` in steps, release."""
        held = {"button": "left", "buttons": 1, "modifiers": 8 if shift else 0}
        self.mouse("Pressed", *start, clickCount=1, **held)
        for step in range(1, 6):
            at = [a + (b - a) * step / 5 for a, b in zip(start, end, strict=True)]
            self.mouse("Moved", *at, **held)
        self.mouse("Released", *end, clickCount=1, **held)
        self.frames()

    def wheel(self, x: float, y: float, delta: float, ctrl: bool = False) -> None:
        """Turn the wheel by ``delta`` pixels: negative is away from the person."""
        self.mouse("Wheel", x, y, deltaX=0, deltaY=delta, modifiers=2 if ctrl else 0)
        self.frames()

    def key(self, name: str, text: str = "") -> None:
        """Press and release a key, named as ``KeyboardEvent.key``."""
        text = text or (name if len(name) == 1 else "")
        down = {"type": "keyDown" if text else "rawKeyDown", "key": name}
        self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.frames()

    # ---- what a person sees

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what the window (or the whole page) shows as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the page so far: exceptions, console, security policy."""
        self.run("0")
        return list(self._complaints())

    def _complaints(self) -> Iterator[str]:
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            found, what = event["method"], event["params"]
            if found == "Runtime.exceptionThrown":
                yield str(what["exceptionDetails"])
            elif found == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
                yield str(what["args"])
            elif found == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                yield what["entry"]["text"]

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        self.run("0")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]


#: Chromium expects its pipes as descriptors 3 and 4; a shell may not know numbers above 9.
SHIM = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def launched(program: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended and cleaned up whatever happens."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SHIM,
                str(to_browser),
                str(from_browser),
                program,
                *FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        browser = Browser(process, to_us, from_us)
        try:
            yield browser
            browser.call("Browser.close")
        finally:
            os.close(from_us)
            os.close(to_us)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
