"""TensorBoard itself, started on a folder of runs and looked at in a browser.

python tests/browser/tensorboard_page.py RUNS OUT.png        a picture of the tab "Custom Scalars"
"""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from browser.chrome import BROWSERS, DRIVERS, Chrome, found

SECONDS = 90.0
# TensorBoard builds its older pages from elements with roots of their own: everything inside them too.
INSIDE = """
const all = (root) => [...root.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
const here = all(document);
"""


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows the runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*argv, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        wait(lambda: answers(f"{address}/data/plugin/custom_scalars/layout"), "TensorBoard to serve a layout")
        yield address
    finally:
        server.terminate()
        server.wait(SECONDS)


def answers(address: str) -> bool:
    """Whether there is anything to be read."""
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            return answer.read() not in (b"", b"{}")
    except (urllib.error.URLError, ConnectionError):
        return False


def wait(ready: Callable[[], bool], what: str) -> None:
    """Until it is ready. Raises TimeoutError."""
    end = time.monotonic() + SECONDS
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {SECONDS:.0f} s for {what}")
        time.sleep(0.2)


def opened(chrome: Chrome, address: str, *, height: int) -> None:
    """Show the tab "Custom Scalars" and wait until the charts of the first heading have looked for their lines."""
    size = {"width": 1720, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.devtools("Emulation.setDeviceMetricsOverride", **size)
    chrome.ask("POST", "/url", {"url": f"{address}/?darkMode=false#custom_scalars"})
    wait(lambda: any(lines(chrome).values()), "lines in a chart")


def headings(chrome: Chrome) -> list[str]:
    """The categories that the page shows, from top to bottom."""
    return chrome.run(
        INSIDE + "return here.filter(e => e.tagName === 'TF-CATEGORY-PAGINATED-VIEW').map(e => e.category.name);"
    )


def lines(chrome: Chrome) -> dict[str, int]:
    """How many lines the charts say that they have, by title, of the charts that have looked for them."""
    found = chrome.run(
        INSIDE
        + """return here.filter(e => /^TF-CUSTOM-SCALAR-(MULTI-LINE|MARGIN)-CHART/.test(e.tagName)).map(e => {
            const said = all(e.shadowRoot).map(x => x.textContent).find(t => /^\\s*Matches \\(\\d+\\)\\s*$/.test(t));
            return [e.title, said ? Number(said.match(/\\d+/)[0]) : -1];
        });"""
    )
    return {title: count for title, count in found if count >= 0}


def pictured(chrome: Chrome, runs: Path, out: Path) -> None:
    """The tab "Custom Scalars" of these runs as a PNG."""
    with served(runs) as address:
        opened(chrome, address, height=1240)
        time.sleep(3.0)  # the lines glide into place
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(chrome.screenshot())


def main(argv: list[str]) -> int:
    """Take the picture; returns the exit code."""
    runs, out = map(Path, argv)
    browser, driver = found(BROWSERS), found(DRIVERS)
    if browser is None or driver is None:
        print(f"got no browser, expected one of {BROWSERS} and of {DRIVERS}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        chrome = Chrome(Path(folder), browser=browser, driver=driver)
        try:
            pictured(chrome, runs, out)
            print(headings(chrome), lines(chrome))
        finally:
            chrome.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
