"""A picture of a page, as docs/images has them; keys are pressed before it is taken.

python tests/browser/screenshot.py PAGE.html PICTURE.png [--dark] [--width 1280] [--height 900] [--keys Tab Tab " "]
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from browser.chrome import BROWSERS, DRIVERS, KEYS, Chrome, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY", help=f"characters, or of {', '.join(KEYS)}")
    args = parser.parse_args()
    browser, driver = found(BROWSERS), found(DRIVERS)
    if browser is None or driver is None:
        parser.error(
            f"got no browser, expected one of {BROWSERS} and of {DRIVERS}: apt-get install chromium chromium-driver"
        )
    with tempfile.TemporaryDirectory() as folder:
        window = Chrome(Path(folder), browser=browser, driver=driver)
        try:
            window.open(args.page, width=args.width, height=args.height, dark=args.dark)
            window.press(*args.keys)
            args.picture.write_bytes(window.screenshot())
        finally:
            window.close()


if __name__ == "__main__":
    main()
