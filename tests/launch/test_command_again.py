"""The command printed on Ctrl-C or SIGTERM before training begins: the launcher, the flags and the run folder."""

import os
import signal
import time

import pytest

from grpo_fn import run
from grpo_fn.command_line import EXIT_INTERRUPTED, EXIT_TERMINATED, sigterm_interrupts

FLAGS = ["--gin_file", "a b.gin", "--gin_param", "STEPS=3", "--run_dir", "runs/x"]
SAME = "-m grpo_fn.run 'a b.gin' --set STEPS=3 --run_dir runs/x"


@pytest.mark.parametrize(
    ("world", "here", "launcher"),
    [
        (None, None, "python"),
        ("8", "4", "torchrun --nnodes 2 --nproc-per-node 4"),
    ],
)
def test_ctrl_c_before_training_prints_the_launcher(monkeypatch, capsys, world, here, launcher) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    def interrupt(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "launch_training", interrupt)
    assert run.main(FLAGS) == EXIT_INTERRUPTED
    assert capsys.readouterr().err.rstrip().endswith(f": {launcher} {SAME}")


def test_sigterm_before_training_prints_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def terminate(*args: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    monkeypatch.setattr(run, "launch_training", terminate)
    assert run.main(FLAGS) == EXIT_TERMINATED
    assert capsys.readouterr().err.rstrip().endswith(f": python {SAME}")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_rank_of_torchrun_and_a_process_with_a_handler_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_interrupts():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with sigterm_interrupts():
        assert signal.getsignal(signal.SIGTERM) == before
