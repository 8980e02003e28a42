# Copyright (c) the d2_memfit developers.
"""A headless Chromium that opens pages, and moves and clicks a real mouse.

It is spoken to by the DevTools protocol, over two pipes, which need no port and no library.
"""

import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_OPTIONS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --window-size=1200,1600"
_TIMEOUT_S = 60


@contextmanager
def browser(profile):
    """Open one, whose files are in the folder ``profile``; yields a :class:`Browser`."""
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for pair in (os.pipe(), os.pipe()) for fd in pair]
    to_read, write, read, to_write = ends
    command = f"exec {CHROMIUM} {_OPTIONS} --user-data-dir={shlex.quote(str(profile))}"
    process = subprocess.Popen(
        ["bash", "-c", f"{command} about:blank 3<&{to_read} 4>&{to_write}"],
        pass_fds=(to_read, to_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(read, write)
    finally:
        process.terminate()
        process.wait()
        os.close(read)
        os.close(write)


class Browser:
    """
    Attributes:
        asked_for: addresses that pages have asked for.
        errors: of the pages' scripts.
    """

    def __init__(self, read, write):
        self.asked_for, self.errors = [], []
        self._read, self._write = read, write
        self._text = b""
        self._number = 0
        self._session = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def open(self, path):
        """Open a file, or an address."""
        address = path if "://" in str(path) else f"file://{path}"
        self.call("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def move(self, selector, x=0.5, y=0.5):
        """Point at a place of an element: shares of its width and height."""
        self._mouse("mouseMoved", selector, x, y)

    def click(self, selector, x=0.5, y=0.5):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, selector, x, y)

    def _mouse(self, kind, selector, x, y):
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, **place, **button)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._text:
            assert select.select([self._read], [], [], _TIMEOUT_S)[0], "Chromium does not answer"
            received = os.read(self._read, 2**20)
            assert received, "Chromium has ended"
            self._text += received
        text, self._text = self._text.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.asked_for.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        return message
