"""Bad input ends with one message that says what was got and what was expected, before anything is made or begun."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.running import command, finish

from grpo_fn.shell.model import tiny

ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.Qwen2Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=256)
    path = tmp_path_factory.mktemp("random") / "model"
    tiny.make_random(shape, path, seed=0, chat=False)
    return path


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def model(random_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_model, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", ROWS)
    write_rows(tmp_path / "data" / "test.jsonl", ROWS[:4])
    return tmp_path / "data"


def full_disk() -> None:
    """Doom: there are ten bytes left."""
    from grpo_fn.shell import atomic_io

    atomic_io.free_bytes = lambda path: 10


def no_network() -> None:
    """Doom: a hub name is looked up in no cache and on no hub."""
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True


def gsm8k(model: Path | str, data: Path, run_dir: Path, **changes: object) -> list[str]:
    bindings = {"MODEL": model, "DATA": data, "STEPS": 1, "PROMPTS": 2, "EVAL_PROBLEMS": 2, "MAX_NEW_TOKENS": 4}
    bindings |= {"step.Algorithm.group_size": 2}
    bindings |= {name.replace("__", "."): value for name, value in changes.items()}
    params = [part for name, value in bindings.items() for part in ("--gin_param", f"{name}={value}")]
    return ["--gin_file", "run/gsm8k.gin", *params, "--run_dir", str(run_dir)]


def refused(
    argv: list[str], folder: Path, *said: str, doom: Callable[[], None] | None = None, expected: int = 2
) -> None:
    """The command ends with 2, or the code that is `expected`, and one message holding all of `said`; no run folder."""
    (folder / "out").unlink(missing_ok=True)
    code = finish(argv, folder / "out", doom)
    out = re.sub(r"\A(reading .*\n| *\d+\.\d s  .*\n)*", "", (folder / "out").read_text())  # what was begun before
    assert code == expected, out
    assert out.startswith("error: "), out
    assert "Traceback" not in out
    for text in said:
        assert text in out, f"{text!r} is not in:\n{out}"
    assert not (folder / "run").exists(), "a run folder was left behind"


def test_a_prompt_too_long_for_the_model_is_found_wherever_it_is(model: Path, data: Path, tmp_path: Path) -> None:
    write_rows(data / "train.jsonl", [*ROWS, {"question": "So? " * 99, "answer": "#### 1"}])
    argv = gsm8k(model, data, tmp_path / "run", STEPS=9)
    said = ("got 1 of 5 training ones over the 252 tokens", "expected none", "has at least 467", "So? So?")
    refused(argv, tmp_path, *said)


def test_files_devices_and_models_that_a_command_names_must_exist(cache: Path, data: Path, tmp_path: Path) -> None:
    where = ["--run_dir", str(tmp_path / "run")]
    unknown = command(cache, tmp_path / "run", credit__outcome__advantage="@advantage.centred")
    refused(unknown, tmp_path, "centred", "centered")
    refused(["--gin_file", "run/gsm8k.gin", "--gin_param", f"DATA={data}", *where], tmp_path, "MODEL")
    refused(["--gin_file", "run/gsm8.gin", *where], tmp_path, "run/gsm8k.gin")
    device = command(cache, tmp_path / "run", sections__Compute__device="'cuda:99'")
    refused(device, tmp_path, "got device 'cuda:99'", "expected one that")
    hub = gsm8k("no-such-user/no-such-model", data, tmp_path / "run")
    refused(hub, tmp_path, "got model 'no-such-user/no-such-model'", "expected", doom=no_network)


def test_a_full_disk_is_one_line_with_its_own_exit_code(cache: Path, tmp_path: Path) -> None:
    said = ("no space left: got 10 bytes", "expected")
    refused(command(cache, tmp_path / "run"), tmp_path, *said, doom=full_disk, expected=74)  # the agent tries it again


REFUSED = """
from __gin__ import dynamic_registration

from e2e import engines
from grpo_fn.shell.sampler import probe
from grpo_fn.trainer import sections

sections.Sampling.sampler = @engines.cutting
sections.Sampling.probe = @probe.Probe()
probe.Probe.max_gap = 0.05
"""


def test_an_engine_that_is_refused_is_one_line_without_a_traceback(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "refused.gin").write_text(REFUSED)
    argv = [*command(cache, tmp_path / "run"), "--gin_file", str(tmp_path / "refused.gin")]
    assert finish(argv, tmp_path / "out") == 1, (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "error: " in line]
    assert line.startswith("error: engine 0 of 1: got draws that the policy's distribution makes with a chance of ")


def test_a_run_folder_of_something_else_is_left_alone(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    refused(command(cache, tmp_path / "mine"), tmp_path, "thesis.tex", "expected an empty one")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
