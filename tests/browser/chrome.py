"""A real browser for tests: headless Chromium, driven by its own ChromeDriver over plain HTTP on this machine."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium.chromedriver")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what W3C WebDriver calls a reference to an element
KEYS = {"Tab": "\ue004", "Home": "\ue011", "End": "\ue010", "Escape": "\ue00c"}
KEYS |= {"ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015", " ": " "}
DEADLINE = 60.0  # seconds, of a start or of one command


class BrowserError(AssertionError):
    """What the browser answered instead of doing what it was asked."""


def found(names: Sequence[str]) -> str | None:
    """The first of these programs that there is."""
    return next((path for name in names if (path := shutil.which(name))), None)


class Chrome:
    """One window. Everything the page logs and every address it asks for can be read afterwards."""

    def __init__(self, folder: Path, *, browser: str, driver: str) -> None:
        self._log = open(folder / "chromedriver.log", "w+")  # noqa: SIM115 - closed by close()
        self._driver = subprocess.Popen(
            [driver, "--port=0"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what other tests send to a group is not for the browser
        )
        try:
            self._root = f"http://127.0.0.1:{self._port()}"
            self._session = self._start(folder, browser)
        except BaseException:
            self._driver.kill()
            raise

    def _start(self, folder: Path, browser: str) -> str:
        options = {"binary": browser, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        return self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})["sessionId"]

    def _port(self) -> int:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end and self._driver.poll() is None:
            self._log.seek(0)
            for line in self._log:
                if "started successfully on port" in line:
                    return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
            time.sleep(0.05)
        raise BrowserError(f"ChromeDriver does not start: {(self._log.seek(0), self._log.read())[1]}")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(f"{method} {path}: {json.load(error)['value']['message']}") from error

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One WebDriver command of this session."""
        return self._call(method, f"/session/{self._session}{path}", body)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file; what was logged before is forgotten."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("POST", "/url", {"url": "about:blank"})  # the first page of a new window asks for its own things
        self.logged("browser"), self.logged("performance")
        self.ask("POST", "/url", {"url": page.absolute().as_uri()})
        ready = "return document.readyState === 'complete' && location.href === arguments[0]"
        self.wait(ready, page.absolute().as_uri())  # on a busy machine the driver comes back before that

    def wait(self, script: str, *args: object) -> None:
        """Until what a script returns is true."""
        until = time.monotonic() + DEADLINE
        while not self.run(script, *args):
            if time.monotonic() > until:
                raise BrowserError(f"got no true answer within {DEADLINE:g} s, expected one: {script} {args}")
            time.sleep(0.05)

    def devtools(self, command: str, **params: object) -> Any:
        """One command of the DevTools protocol."""
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def run(self, script: str, *args: object) -> Any:
        """What a script's `return` gives."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def press(self, *keys: str) -> None:
        """Keys, one after the other, as a keyboard sends them."""
        strokes = [{"type": kind, "value": KEYS.get(k, k)} for k in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def point(self, selector: str) -> None:
        """Move the pointer onto the first element that matches."""
        element = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "origin": {ELEMENT: element[ELEMENT]}, "x": 0, "y": 0}
        self.ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """What came since it was last asked for: "browser" is the console and errors, "performance" the network."""
        return self.ask("POST", "/se/log", {"type": kind})

    def requested(self) -> dict[str, str | None]:
        """Every address that was asked for since the page was opened, and what stopped the request, if anything did."""
        events = [json.loads(entry["message"])["message"] for entry in self.logged("performance")]
        stopped = {
            e["params"]["requestId"]: e["params"].get("blockedReason", e["params"]["errorText"])
            for e in events
            if e["method"] == "Network.loadingFailed"
        }
        return {
            e["params"]["request"]["url"]: stopped.get(e["params"]["requestId"])
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        }

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.ask("GET", "/screenshot"))

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            self.ask("DELETE", "")
        except urllib.error.URLError:
            pass  # it is gone already
        finally:
            self._driver.terminate()
            self._driver.wait(DEADLINE)
            self._log.close()
