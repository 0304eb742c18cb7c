"""Count what one training step enters: the files, functions and lines that someone reads who follows it.

python tools/step_files.py               a table of files, and the totals in the last line
python tools/step_files.py --functions   with the functions of each file

It trains run/arithmetic.gin, made small, for two steps in a temporary folder, and records the functions of grpo_fn that
the main thread enters during the second `take_step` of grpo_fn.trainer.loop. The run prints to stderr.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

STEP = 2  # the first step has lazy imports and caches of its own
# Sums of two numbers by one layer: after 40 updates some answers are right, so that no step is left out. 10 s.
SMALL = {"STEPS": STEP, "TEST_SIZE": 8, "OPERATIONS": 1, "models.TinyModel.layers": 1}
SMALL |= {"models.TinyModel.steps": 40, "models.TinyModel.rows": 16, "models.word_problem_lessons.worked_share": 0.0}


def entries_of_a_step() -> tuple[Path, set[tuple[str, int, str]]]:
    """The folder of grpo_fn, and (file, line, function) of what a step enters. Raises SystemExit when the run fails."""
    from grpo_fn import run
    from grpo_fn.trainer import loop

    package, take_step = Path(run.__file__).resolve().parent, loop.take_step
    entries, calls = set[tuple[str, int, str]](), 0

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{package}/"):
            entries.add((code.co_filename, code.co_firstlineno, code.co_qualname))

    def recorded(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        sys.setprofile(record if calls == STEP else None)
        try:
            return take_step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    loop.take_step = recorded
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        small = {**SMALL, "models.TinyModel.cache": repr(f"{folder}/models")}
        params = [word for name, value in small.items() for word in ("--gin_param", f"{name}={value}")]
        status = run.main(["--gin_file", "run/arithmetic.gin", *params, "--run_dir", f"{folder}/run"])
        if status or not entries:
            sys.exit(f"error: got exit code {status} after {calls} calls of take_step, expected 0 after {STEP}")
        last = json.loads(Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        if last["train/skipped_step"]:
            sys.exit("error: no reward differs within a group, and the step is not trained on; enlarge SMALL")
    return package, entries


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the totals."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=style)
    parser.add_argument("--functions", action="store_true", help="print the functions of each file, too")
    verbose = parser.parse_args(argv).functions
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors; threads only wait for each other
    package, entries = entries_of_a_step()
    functions = defaultdict[Path, list[str]](list)
    for file, _, name in sorted(entries):
        functions[Path(file)] += [] if name.endswith(">") else [name]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in functions}
    print("functions  lines  file")
    for path, names in functions.items():
        print(f"{len(names):9}  {lines[path]:5}  {path.relative_to(package)}")
        print("".join(f"{'':18}{name}\n" for name in names if verbose), end="")
    print(f"files {len(lines)} functions {sum(map(len, functions.values()))} lines of files {sum(lines.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
