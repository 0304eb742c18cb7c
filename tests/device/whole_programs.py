"""Programs of the project on the fake device, and what they launched there.

    whole_programs.py check gradients,rows      # tools/device_check --device cuda --tiny --only ...
    whole_programs.py runs FILE                 # an object of argument lists for grpo_fn.run, by name

The last line of the output is an object: exit codes by name, launches by operator, the devices in use.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import fake_cuda as fake

# isort: split
import device_check
import device_runner
import torch

from grpo_fn import run


def ended(argv: list[str]) -> object:
    """A run's exit code, or its error."""
    try:
        return run.main(argv)
    except BaseException as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, what = sys.argv[1:]
    if kind == "check":
        argv = ["--device", "cuda", "--tiny", "--only", what]
        codes: dict[str, object] = {"check": device_check.main(argv, run=device_runner.outcomes_here)}
    else:
        codes = {name: ended(argv) for name, argv in json.loads(Path(what).read_text()).items()}
    graphs = {"graphs": fake.CUDAGraph.made, "replays": fake.CUDAGraph.replayed}
    print(json.dumps({"codes": codes, "launches": fake.backend.launches(), "devices": fake.backend.used(), **graphs}))
    sys.stdout.flush()
    os._exit(0)  # Python's end would wait for threads of a device that is not there
