"""A teacher on a real server: what it says of given tokens is what transformers computes from the same folder."""

from pathlib import Path

import pytest
import torch
from engines import POSITIONS, seat_of, small
from fakes import VOCABULARY, tokenizer
from test_dedicated import Process

from grpo_fn.core.types import Rollout
from grpo_fn.shell.vllm.served_teacher import VllmTeacher


def test_log_probs_are_those_of_the_model_and_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    model = small("qwen2", tied=True)
    seat_of(model, tmp_path / "model", dtype=torch.float32)
    process = Process(tmp_path / "model", tmp_path / "log")
    try:
        process.wait()
        knobs = {"servers": [process.url], "max_requests": 4, "request_seconds": 120.0, "server_timeout": 60.0}
        teacher = VllmTeacher(max_model_len=POSITIONS, **knobs)
        teacher.check_server("t", tokenizer(), VOCABULARY, POSITIONS - 1)
        with pytest.raises(ValueError, match=rf"which cannot read id {VOCABULARY}, expected each of the policy's"):
            teacher.check_server("t", tokenizer(), VOCABULARY + 1, POSITIONS - 1)
        with pytest.raises(ValueError, match=rf"which reads {POSITIONS} tokens, expected .* {POSITIONS + 1}"):
            VllmTeacher(max_model_len=POSITIONS + 1, **knobs).check_server("t", tokenizer(), VOCABULARY, POSITIONS)
        tokens = torch.randint(VOCABULARY, (5, POSITIONS - 1), generator=torch.Generator().manual_seed(0))
        length = torch.tensor([POSITIONS - 1, 3, 40, 129, 2])  # the longest there may be, and blocks of a cache
        column = torch.arange(POSITIONS - 1)
        mask = (column < length[:, None]) & (column >= 1) & (column % 3 != 0)
        rollout = Rollout(tokens, mask, torch.zeros(tokens.shape), mask[:, 0], ("",) * 5)
        got = teacher.logp(rollout)
    finally:
        process.kill()
    with torch.no_grad():
        every = torch.log_softmax(model(tokens).logits.float(), -1)
    expected = torch.zeros(tokens.shape)
    expected[:, 1:] = every[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(got, torch.where(mask, expected, 0.0), rtol=0, atol=1e-4)
