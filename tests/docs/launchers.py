"""Launchers really start, beside stand-ins for what they start: what every rank would run is noted.

Nothing of a cluster is here, so `rules` has one process do that.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.doing import Place, begun
from docs.pages import ROOT
from docs.stand_ins import executable
from torch.distributed import run as torchrun

from docs import desk


def found(name: str, place: Place) -> Path:
    """The script of this name; by the last part of it alone, that of a recipe."""
    path = place.folder / name
    return path if path.is_file() else next((place.folder / "experiments").glob(f"*/{name}"), path)


def agent_arguments(argv: Sequence[str], place: Place, env: Mapping[str, str]) -> list[str]:
    """Start a launcher, in a run folder of its own; what it asks agent.py for, on every rank."""
    for name in ("agent", "vllm", "sbatch"):
        (place.notes / name).unlink(missing_ok=True)
    done = begun(argv, place, {"RUN_DIR": f"runs/launched_{next(desk.NUMBER)}", **env})
    assert (place.notes / "agent").exists(), f"{' '.join(argv)} started no agent: {done.err}"
    return ranks((place.notes / "agent").read_bytes().decode().split("\0")[1:-1])


def ranks(argv: Sequence[str]) -> list[str]:
    """What every rank is to run, with torchrun's own parser for what comes before."""
    asked = torchrun.get_args_parser().parse_args([*argv])
    return [*(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args]


def server(path: Path, given: Sequence[str], place: Place, env: Mapping[str, str]) -> None:
    """The script starts with a stand-in for vLLM, which notes every argument."""
    env = {"PORT": "8000", **env}
    begun([path, *given], place, env | {"SERVED": "0.05"})
    said = (place.notes / "vllm").read_bytes().decode().split("\0")[:-1]
    assert said[said.index("--port") + 1] == env["PORT"]
    transfer = env.get("TRANSFER", "file")
    assert f'{{"backend": "grpo_{transfer}"}}' in said
    assert len(given) == 1 or said[-len(given) + 1 :] == [*given[1:]]


def checks(path: Path, given: Sequence[str], place: Place) -> None:
    """The tests of a check are the suite's own, run beside this one: here they are only asked for by name."""
    executable(place.notes / "pytest-python", '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>"$NOTES/checked"\n')
    env = desk.environment(place.things, place.notes) | {"PYTHON": str(place.notes / "pytest-python")}
    begun([path, *given], place, env)
    named = [word for word in (place.notes / "checked").read_text().splitlines() if word.startswith("tests/")]
    assert named
    assert all((ROOT / word.partition("::")[0]).exists() for word in named)


def submitted(argv: Sequence[str], place: Place, env: Mapping[str, str]) -> list[str]:
    """As `agent_arguments`, of a script that is run as Slurm would, by stand-ins for Slurm's commands."""
    script = next(word for word in argv[1:] if not word.startswith("-"))
    assert (ROOT / script).is_file(), f"got {script}, expected a script that there is"
    left_out = ["--gin_file", "run/arithmetic.gin"] if argv[-1] == script else []
    return agent_arguments([str(place.things.bin / "sbatch"), *argv[1:], *left_out], place, env)
