"""Run a program of the project on the fake device, and say what it launched and waited for.

    python tests/device/rehearse.py check gradients,rows      # tools/device_check --device cuda --tiny --only ...
    python tests/device/rehearse.py check all                 # all of them but those for two cards
    python tests/device/rehearse.py larger decode             # the same without --tiny
    python tests/device/rehearse.py run grpo_fn.run --gin_file run/arithmetic.gin --gin_file scale/bf16.gin ...
    python tests/device/rehearse.py runs FILE                 # an object of argument lists for grpo_fn.run, by name

With TORCH_COMPILE_DISABLE=1: there is no compiler for the device. The last line of the output is an object with the
exit code, launches, waits, graphs captured and replayed, streams made, the devices in use, and the bytes at most. A
card has 4 GiB of this machine's memory, whatever it says of its own: what wants more runs out of it.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/device_check"), str(Path(__file__).parent)]

import fake_cuda as fake  # noqa: E402 before torch

# isort: split
import torch  # noqa: E402


def counts(code: int) -> dict[str, object]:
    """What happened on the device since the last time it was cleared."""
    return {
        "code": code,
        "launches": fake.backend.launches(),
        "waits": fake.backend.waits(),
        "graphs": fake.CUDAGraph.made,
        "replays": fake.CUDAGraph.replayed,
        "streams": fake.Stream.made,
        "devices": fake.backend.used(),
        "most_bytes": [fake.backend.most_allocated(device) for device in range(fake.backend.DEVICES)],
    }


def several(path: str) -> dict[str, object]:
    """Runs one after another in this process: of each the exit code or the error, and what was counted."""
    from grpo_fn import run

    found: dict[str, object] = {}
    for name, argv in json.loads(Path(path).read_text()).items():
        fake.backend.clear()
        begun = time.process_time()
        try:
            ended: object = run.main(argv) or 0
        except BaseException as error:
            traceback.print_exc()
            ended = f"{type(error).__name__}: {error}"
        waits, launches = (sum(x.values()) for x in (fake.backend.waits(), fake.backend.launches()))
        found[name] = {"ended": ended, "launches": launches, "waits": waits, "seconds": time.process_time() - begun}
        print(name, found[name], flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    """The program's exit code."""
    torch.set_num_threads(1)
    kind, what, *rest = argv
    if kind in ("check", "larger"):
        device_check, device_runner = (importlib.import_module(x) for x in ("device_check", "device_runner"))
        shapes = ["--tiny"] if kind == "check" else []
        if what == "all":  # ranks are other processes, and the device is in this one
            what = ",".join(check.name for check in device_check.CHECKS if check.part != "cards")
        return device_check.main(["--device", "cuda", *shapes, "--only", what, *rest], run=device_runner.here)
    return importlib.import_module(what).main(rest) or 0


if __name__ == "__main__":
    if sys.argv[1] == "runs":
        code, said = 0, several(sys.argv[2])
    else:
        said = counts(code := main(sys.argv[1:]))
    print(json.dumps(said), flush=True)
    os._exit(code)  # Python's end would wait for threads of a device that is not there
