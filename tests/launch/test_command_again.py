"""The command printed on Ctrl-C before training begins: the launcher, the flags and the run folder."""

import pytest

from grpo_fn import run
from grpo_fn.command_line import EXIT_INTERRUPTED

FLAGS = ["--gin_file", "a b.gin", "--gin_param", "STEPS=3", "--run_dir", "runs/x"]
SAME = "-m grpo_fn.run --gin_file 'a b.gin' --gin_param STEPS=3 --run_dir runs/x"


@pytest.mark.parametrize(
    ("world", "here", "launcher"),
    [
        (None, None, "python"),
        ("1", "1", "python"),
        ("2", "2", "torchrun --nproc-per-node 2"),
        ("8", "4", "torchrun --nnodes 2 --nproc-per-node 4"),
    ],
)
def test_ctrl_c_before_training_prints_the_launcher(monkeypatch, capsys, world, here, launcher) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "launch_training", interrupt)
    assert run.main(FLAGS) == EXIT_INTERRUPTED
    assert capsys.readouterr().err.rstrip().endswith(f": {launcher} {SAME}")
