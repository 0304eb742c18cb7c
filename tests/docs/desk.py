"""What the documented commands work on: a folder a page, where names of the page are small things made once a session.

A desk looks like the project's root, so paths of ours are what the page says. What a page takes for given is put there
under the page's own names: RUN, runs/x, rows.jsonl. What differs from a page is in GIVEN, SMALL, `one` and `small_run`.
"""

import itertools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.pages import ROOT
from e2e.running import SMALL as SMALL_RUN

# What the pages call a run folder that is there, a folder or file to be written, a model that the reader has.
RUNS = ("RUN", "D", "A", "B", "runs/x", "runs/seed_0", "runs/seed_1", "DIR/trials")
NEW = ("D", "DIR", "OUT")
HUB = re.compile(r"[A-Z]\w*/[\w.-]+")  # a name of the model hub
# Words that stand for others wherever they are an argument.
GIVEN = {
    "N": "2",
    "40": "1",  # the last step of the tutorial
    "P": "RUN/checkpoints/step_4",
    "FILE": "trl.yaml",
    "+N": "+2",
    "runs/x/checkpoints/step_100": "runs/x/checkpoints/step_4",
    "sections.Logging.profile_steps=(3, 20)": "sections.Logging.profile_steps=(1, 2)",
    "NAME=VALUE": "optimizer.adamw.lr=0.0",
    "NAME=A,B": "SEED=0,1",
}
# A run that takes a model and data: bound before what the page binds, so that the page has its way.
SMALL = {
    "STEPS": 1,
    "PROMPTS": 2,
    "EVAL_PROBLEMS": 2,
    "MAX_NEW_TOKENS": 4,
    "step.Algorithm.group_size": 2,
    "reward_pool.RewardPool.workers": 1,
    "reward_pool.RewardPool.timeout_per_completion": 60.0,
}
# The same of a run of the arithmetic task, on top of e2e/small.gin.
SMALLER = {"STEPS": 2, "TEST_SIZE": 8}
# The same of runs whose model is warm-started on a task of theirs.
ON_TASK = ("run/procedural.gin", "experiments/levels/run.gin")
SMALL_TASK = {
    "STEPS": 1,
    "models.TinyModel.steps": 2,
    "models.TinyModel.rows": 2,
    "step.Algorithm.prompts": 2,
    "step.Algorithm.group_size": 2,
    "step.Algorithm.minibatches": 1,
    "sections.Evaluation.problems": 5,
}
# A recipe that wants what a CPU has not.
QWEN = {"sections.Compute.attention": '"sdpa"', "mesh.Parallelism.compile": "@blocks.eager"}
MORE = {"experiments/qwen_math_2gpu/run.gin": QWEN}
# One that takes more minibatches than e2e/small.gin has prompts.
MINIBATCHES = {"experiments/distillation/exact.gin": {"step.Algorithm.minibatches": 4}}
NUMBER = itertools.count(4242)  # of jobs, and of folders that pages give one name


@dataclass(frozen=True, kw_only=True)
class Things:
    """Made once: a random model, a run of the small arithmetic task, rows of every data set, stand-in programs."""

    folder: Path

    model = property(lambda self: self.folder / "model")
    run = property(lambda self: self.folder / "run")
    cache = property(lambda self: self.folder / "cache")
    data = property(lambda self: self.folder / "data")
    bin = property(lambda self: self.folder / "bin")


def desk(things: Things, folder: Path, text: str) -> Path:
    """A folder to work in: the project, and what `text` takes for given."""
    folder.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("runs", "build", "shared", "evals"):
            (folder / entry.name).symlink_to(entry)
    (folder / "DIR").mkdir()
    (folder / "runs").mkdir()
    for name in RUNS:
        if re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", text):
            shutil.copytree(things.run, folder / name)
    if "--logdir runs" in text and not [*(folder / "runs").iterdir()]:
        shutil.copytree(things.run, folder / "runs" / "x")
    for entry in [*things.data.iterdir(), ROOT / "tests/tools/configs/trl.yaml"]:
        if entry.is_file():
            shutil.copy(entry, folder / entry.name)
    shutil.copy(ROOT / "tests/tools/configs/nemo_rl.yaml", folder / "grpo_math_1B.yaml")
    return folder


# -- what is put in the place of what a page says


def filled(argv: Sequence[str], things: Things) -> list[str]:
    """Arguments with GIVEN words, the small model and small data in the place of the page's."""
    out: list[str] = []
    for word in argv:
        out.append(one(word, out[-1] if out else "", argv, things))
    return out


def one(word: str, flag: str, argv: Sequence[str], things: Things) -> str:
    """What stands for a word that follows another."""
    if word in ("MODEL", "FOLDER") or (flag == "--model" and (word == "M" or HUB.fullmatch(word))):
        return str(things.model)
    if (flag in ("--out", "--runs") and word in NEW) or word == "OUT":
        return f"new_{word}_{next(NUMBER)}"
    if flag == "--data":
        return str(things.data)
    if flag == "--gin_file" and word == "F":
        return "run/arithmetic.gin"
    if flag == "--run_dir" and (word == "D" or word.startswith("/")):
        return f"runs/new_{word.rsplit('/', 1)[-1]}_{next(NUMBER)}"
    if word.startswith("MODEL="):
        return f"MODEL={things.model}"
    if word.startswith("DEMONSTRATIONS=") or (word.startswith("DATA=") and "run/sft.gin" in argv):
        return f"{word.partition('=')[0]}={things.data / 'demonstrations.jsonl'}"
    if word.startswith(("DATA=", "GSM8K=")):
        return f"{word.partition('=')[0]}={data(word, argv, things)}"
    return GIVEN.get(word, word)


def data(word: str, argv: Sequence[str], things: Things) -> Path:
    """The rows that a configuration asks for by this macro."""
    said = " ".join(argv)
    if word.startswith("GSM8K") or "gsm8k" in re.sub(r"\S*=\S*", "", said):
        return things.data / "gsm8k"
    return things.data / ("mbpp" if "mbpp" in said or "code_" in said else "math")


def small_run(argv: Sequence[str], things: Things) -> list[str]:
    """Flags of grpo_fn.run for a run of a second: SMALL with the small model, or e2e/small.gin over arithmetic.

    What samples or evaluates with vLLM says what it would be.
    """
    files = [argv[i + 1] for i, word in enumerate(argv) if word == "--gin_file"]
    given = [word for word in argv if word.startswith(("MODEL=", "DATA="))]
    if "--dry_run" in argv:
        return [*argv]
    if "run/sft.gin" in files:
        return before_params([], {"STEPS": 1, "ROWS": 2, "HELD_OUT": 2, "MAX_NEW_TOKENS": 4}, argv)
    local = any(name.endswith("engine/local.gin") for name in files)
    served = any(word.startswith(("SERVERS=", "EVAL_SERVERS=")) for word in argv)
    if not local and (served or any("vllm" in name for name in files)):
        return [*argv, "--dry_run"]
    recipe = next((str(Path(name)) for name in files if "experiments/" in name), "")
    recipe = recipe[recipe.find("experiments/") :]
    if needs_model(files, given):
        rows = (
            {"DATA": data("DATA", argv, things)} if all("/" in name for name in files) else {}
        )  # the reader's own file
        bound = {"MODEL": things.model} | rows | SMALL
        if "qwen" in recipe:
            bound["GSM8K"] = data("GSM8K", argv, things)
        bound |= MORE.get(recipe, {})
        return before_params([], bound, argv)
    if any(name in ON_TASK for name in files):
        return before_params([], SMALL_TASK | cache(things), argv)
    fewer = next((MINIBATCHES[name] for name in files if name in MINIBATCHES), {})
    bound = SMALLER | {"models.TinyModel.steps": 5} | cache(things) | fewer
    return before_params(["--gin_file", str(SMALL_RUN)], bound, argv)


def cache(things: Things) -> dict[str, str]:
    return {"models.TinyModel.cache": repr(str(things.cache))}


def needs_model(files: Sequence[str], given: Sequence[str]) -> bool:
    """Whether a configuration asks for a model and data of the reader's."""
    return bool(given) or any(name in ("run/gsm8k.gin", "run/math.gin", "run/mbpp_code.gin") for name in files)


def before_params(files: Sequence[str], bound: dict, argv: Sequence[str]) -> list[str]:
    """More gin files, which win over the page's, and more bindings, over which the page's own win."""
    params = [part for name, value in bound.items() for part in ("--gin_param", f"{name}={value}")]
    return [*params, *with_files(files, argv)]


def with_files(files: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The files after the last one of the page."""
    last = max((i for i, word in enumerate(argv) if word == "--gin_file"), default=-2) + 2
    return [*argv[:last], *files, *argv[last:]]


def environment(things: Things, notes: Path) -> dict[str, str]:
    """Of a command: the stand-ins first, nothing that a batch system left."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "TORCHELASTIC", "CUDA_", "GRPO_FN_", "PYTEST_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "RUN_DIR", "PORT", "MODULE", "PYTHON"):
        kept.pop(name, None)
    kept["PATH"] = os.pathsep.join((str(things.bin), kept["PATH"]))
    job = {
        "SLURM_JOB_ID": str(next(NUMBER)),
        "SLURM_JOB_NAME": "grpo",
        "SLURM_JOB_NODELIST": "node-[1-9]",
        "SLURM_NNODES": "1",
    }
    fake = {"FAKE": str(notes), "FAKE_STATE": "RUNNING", "FAKE_GPUS": "1", "FAKE_SHORT": "", "FAKE_NODES": "node-1"}
    own = {"NOTES": str(notes), "PYTHON": str(things.bin / "python"), "OMP_NUM_THREADS": "1", "SERVED": "2"}
    return kept | job | fake | own
