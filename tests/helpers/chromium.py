"""A headless Chromium, driven over a pipe with its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Without these it tries to reach the network at every start.
_ALONE = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


class Chromium:
    """One page in a new profile; use it as a context manager."""

    def __enter__(self) -> Chromium:
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="tbbn-chromium-")
        asks, self._asks = os.pipe()
        self._answers, answers = os.pipe()

        def place() -> None:  # it reads from descriptor 3 and writes to 4
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (asks, answers)]  # free ones, out of the way
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--hide-scrollbars", *_ALONE]
        self._process = subprocess.Popen(
            [PROGRAM, *flags, "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(asks)
        os.close(answers)
        self._input = os.fdopen(self._answers, "rb")
        self._number, self._session = 0, None
        self.requests: list[str] = []  # addresses that the page asked for
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Network.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._asks)
        self._input.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._input.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=scheme)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Page.navigate", url=page.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, top: float = 0, height: float = 900) -> None:
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        taken = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def print(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True)["data"]))
