"""A trainer with nothing to train: joins the others, counts steps with them, saves the count, resumes from it.

It takes the flags, answers the signals and ends with the exit codes of grpo_fn.run, and starts in a second. Every step
of every rank is a line in trace.jsonl, so that a test can see who was there. Bindings: STEPS, PACE (seconds a step),
DEADLINE, SAVE (seconds that saving takes after a stop), FAULT (exit code of the last rank at step 2, first attempt).
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from grpo_fn import run
from grpo_fn.shell.atomic_io import write_json
from grpo_fn.shell.process import EXIT_STOPPED, StopRequest
from grpo_fn.shell.world import EXIT_LOST, LostRank, World, join_world


def main() -> int:
    args = run.flags().parse_args()
    knobs = {"STEPS": "6", "PACE": "0.05", "DEADLINE": "20", "SAVE": "0", "FAULT": "0"}
    knobs |= dict(param.split("=", 1) for param in args.gin_param)
    if not Path(args.gin_file[0]).exists():
        print(f"error: got no file {args.gin_file[0]}, expected a gin file", file=sys.stderr)
        return 2
    try:
        with StopRequest() as stop:
            return work(join_world("cpu", deadline=float(knobs["DEADLINE"])), args.run_dir, knobs, stop)
    except LostRank as lost:
        print(lost, file=sys.stderr, flush=True)
        os._exit(EXIT_LOST)  # the backend's threads abort an interpreter that ends while a connection is broken


def work(world: World, run_dir: Path, knobs: dict[str, str], stop: StopRequest) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    saved, attempt = run_dir / "count.json", int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if world.main:
        write_json(run_dir / "run.json", {"fingerprint": "stand-in"})
    done = world.agree(lambda: json.loads(saved.read_text()) if saved.exists() else 0, what="resuming")
    while done < int(knobs["STEPS"]):
        done += 1
        world.where = f"step {done}"
        world.same(done, what="the step")
        note(run_dir, {"step": done, "rank": world.rank, "size": world.size, "attempt": attempt})
        if int(knobs["FAULT"]) and done == 2 and attempt == 0 and world.rank == world.size - 1:
            os._exit(int(knobs["FAULT"]))
        time.sleep(float(knobs["PACE"]))
        if stopping := any(world.exchange(bool(stop.requested), what="whether to stop")):
            time.sleep(float(knobs["SAVE"]))
        if world.main:
            write_json(saved, done)
        if stopping:
            world.leave()
            return EXIT_STOPPED
    world.leave()
    return 0


def note(run_dir: Path, line: dict) -> None:
    line |= {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": sys.argv[1:],
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
    }
    with (run_dir / "trace.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
