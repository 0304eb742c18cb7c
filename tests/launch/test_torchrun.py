"""tools/launch/torchrun.sh: all devices of a machine, its own errors, restarts, stops."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch.launching import (
    LAUNCH,
    agent_arguments,
    environment,
    flags,
    listening_python,
    program,
    run,
    trace,
)

SCRIPT = LAUNCH / "torchrun.sh"
GPUS = "GPU 0: NVIDIA X (UUID: GPU-1)\nGPU 1: NVIDIA X (UUID: GPU-2)\nGPU 2: NVIDIA X (UUID: GPU-3)\n"
args = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=5)


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bin")
    listening_python(folder)
    program(folder, "nvidia-smi", f'#!/usr/bin/env bash\n[[ $* == -L ]] && printf "{GPUS}"\n')
    return folder


def asked(bin_dir: Path, *given: str, **env: str) -> list[str]:
    done = run([SCRIPT, *given], environment(bin_dir, PYTHON=str(bin_dir / "listening_python"), **env))
    assert done.returncode == 0, done.stderr
    return agent_arguments(bin_dir)[1:]


@settings(max_examples=15)
@given(args)
def test_every_further_argument_arrives_as_it_was_given(bin_dir: Path, given: list[str]) -> None:
    assert asked(bin_dir, "--gin_file", "f", *given)[-len(given) - 4 :] == [
        *("-m", "launch.stand_in", "--gin_file", "f"),
        *given,
    ]


def test_there_is_a_rank_for_every_device(bin_dir: Path) -> None:
    listed = ["--standalone", "--nproc-per-node=3", "--max-restarts=3", "-m"]
    assert asked(bin_dir, "--gin_file=f")[:4] == listed
    assert asked(bin_dir, "--gin_file=f", CUDA_VISIBLE_DEVICES="0,2")[1] == "--nproc-per-node=2"
    assert asked(bin_dir, "--gin_file=f", NPROC="4")[1] == "--nproc-per-node=4"
    assert asked(bin_dir, "--nproc", "5", "--max-restarts=0", "--gin_file=f")[1:3] == [
        "--nproc-per-node=5",
        "--max-restarts=0",
    ]


@pytest.mark.parametrize("listing", ["exit 9", "echo No devices were found"])
def test_without_devices_there_is_one_rank(tmp_path: Path, listing: str) -> None:
    listening_python(tmp_path)
    program(tmp_path, "nvidia-smi", f"#!/usr/bin/env bash\n{listing}\n")
    assert asked(tmp_path, "--gin_file=f")[1] == "--nproc-per-node=1"


@pytest.mark.parametrize(
    ("given", "env", "complaint"),
    [
        ([], {}, "got no --gin_file, expected one, as in --gin_file run/arithmetic.gin"),
        (["--gin_file=f"], {"NPROC": "0"}, "NPROC: got '0', expected a whole number from 1"),
        (["--gin_file=f"], {"PYTHON": "/bin/false"}, "got no torchrun from /bin/false, expected a Python with this"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(given: list[str], env: dict[str, str], complaint: str) -> None:
    done = run([SCRIPT, *given], environment(**env))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {complaint}")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    done = run([SCRIPT, "--nproc=2", *flags(tmp_path, FAULT=9)], environment())
    assert done.returncode == 0, done.stderr
    assert [(line["attempt"], line["step"]) for line in trace(tmp_path / "run") if line["rank"] == 0] == [
        (0, 1),
        (0, 2),  # not saved: rank 1 died in it
        *((1, step) for step in range(2, 7)),
    ]
    assert {line["size"] for line in trace(tmp_path / "run")} == {2}


@pytest.mark.slow
def test_bad_input_that_two_ranks_find_is_one_line(tmp_path: Path) -> None:
    given = ["--gin_file", "run/arithmetic.gin", "--gin_param", "STEPS=none", "--run_dir", str(tmp_path / "run")]
    done = run([SCRIPT, "--nproc=2", *given], environment(MODULE="grpo_fn.run"))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "got 'none', expected a gin value" in line
    assert not any(word in done.stderr for word in ("signal", "workers", "OMP_NUM_THREADS", "Traceback")), done.stderr
    assert not (tmp_path / "run").exists()
