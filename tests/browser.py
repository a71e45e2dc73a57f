"""A page in headless Chromium, by the DevTools protocol over two pipes: load it, point, read it back.

with Browser(tmp_path) as browser:
    browser.open(path)
    browser.value("document.title")
"""

import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
WIDTH, HEIGHT = 1280, 900
PATIENCE_S = 20.0


class Browser:
    """One tab. Complaints of the page's scripts, and of its content policy, are in `complaints`."""

    def __init__(self, folder: Path):
        """folder: for what the browser keeps of its own."""
        self.complaints: list[str] = []
        self.number, self.session = 0, ""
        out_read, self.out = os.pipe()
        self.answers, in_write = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        # the shell puts the pipes where the browser looks for them
        command = f"exec {shlex.join([str(CHROMIUM), *flags])} 3<&{out_read} 4>&{in_write}"
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(out_read, in_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(out_read)
        os.close(in_write)
        self.rest = b""

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        self.process.wait(120)
        os.close(self.out)
        os.close(self.answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result. Raises RuntimeError with what the browser says is wrong, or when it is gone."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def next(self) -> dict[str, Any]:
        """The next message; complaints are kept."""
        while b"\0" not in self.rest:
            data = os.read(self.answers, 2**20)
            if not data:
                raise RuntimeError("the browser is gone")
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        return message

    def open(self, path: Path) -> float:
        """Load a page of ours; returns the seconds until it is drawn."""
        began = time.monotonic()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.value("document.documentElement?.dataset.ready") != "yes":
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"{path} was not drawn in {PATIENCE_S:.0f} s; {self.complaints}")
            time.sleep(0.02)
        return time.monotonic() - began

    def value(self, expression: str) -> Any:
        """What an expression is in the page. Raises RuntimeError with what it throws."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                f"{expression}: {answer['exceptionDetails']['exception'].get('description')}"
            )
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            buttons=buttons,
            button="left" if buttons or kind == "mouseReleased" else "none",
            clickCount=int(kind != "mouseMoved"),
        )

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
