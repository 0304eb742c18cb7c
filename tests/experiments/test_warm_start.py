"""A warm start is steps of the supervised stage: the same rows, objective and optimizer, and so the same weights."""

import sys
from pathlib import Path

import torch
from fakes import qwen2_tied
from torch import nn

import grpo_fn
from experiments.tiny import models
from grpo_fn.shell.model import tiny

BARE = tiny.byte_tokenizer(chat=False)
PAIRS = [("1+1=", "2"), ("12+30=", "42, I think"), ("7", "7"), ("2-2=", "nothing")]
STEPS, ROWS = 5, 2
LR = 3e-3


def pair(index: int) -> tuple[str, str]:
    return PAIRS[index % len(PAIRS)]


def model() -> nn.Module:
    return qwen2_tied(len(BARE)).double()


def warm_started() -> nn.Module:
    """The model after a warm start on the pairs."""
    made = model()
    rows = ([(asked, False), (answer, True)] for asked, answer in map(pair, range(STEPS * ROWS)))
    models.warm_start(made, BARE, rows, steps=STEPS, batch_rows=ROWS, report=lambda line: None)
    return made


def test_a_warm_start_is_a_plain_loop_over_the_models_own_loss() -> None:
    """transformers' cross entropy, torch's AdamW, a rate that falls along a line: no function of the stage."""
    made = model()
    groups = [
        {"params": [p for p in made.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in made.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    for step in range(STEPS):
        rows = [pair(step * ROWS + n) for n in range(ROWS)]
        texts = [[BARE(text)["input_ids"] for text in row] for row in rows]
        width = max(len(asked) + len(answer) + 1 for asked, answer in texts)
        eos = BARE.eos_token_id
        ids = torch.tensor([(asked + answer + [eos] * width)[:width] for asked, answer in texts])
        labels = torch.full_like(ids, -100)
        for b, (asked, answer) in enumerate(texts):
            labels[b, len(asked) : len(asked) + len(answer) + 1] = torch.tensor([*answer, eos])
        made(input_ids=ids, labels=labels).loss.backward()
        for group in adam.param_groups:
            group["lr"] = LR * (1.0 - 0.9 * step / STEPS)
        adam.step()
        adam.zero_grad()
    for name, x in warm_started().state_dict().items():
        # transformers' loss is in float32, whatever the model is in.
        torch.testing.assert_close(made.state_dict()[name], x, rtol=0, atol=2e-5, msg=name)


def test_what_a_warm_start_runs_is_among_the_sources_of_a_model():
    """Run one, and look at each file of the package whose code an update of it enters."""
    root = str(Path(grpo_fn.__file__).parent)
    entered = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.add(Path(frame.f_code.co_filename))

    sizes = tiny.Qwen2Sizes(vocabulary=len(BARE), positions=16, hidden=8, layers=1, heads=1, kv_heads=1, intermediate=8)
    model = tiny.random_model(sizes.config(), seed=0)
    rows = iter([[("1+1=", False), ("2", True)]])
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        models.warm_start(model, BARE, rows, steps=1, batch_rows=1, report=lambda _: None)
    finally:
        sys.setprofile(before)
    assert {path.name for path in entered} > {"metrics.py", "step.py", "supervised.py", "optimizer.py"}
    assert entered <= {*models.source_files()}


def test_the_warm_start_lowers_the_loss_and_leaves_prompts_alone():
    tokenizer = models.train_tokenizer(["How many? \\boxed{7}"] * 9, vocabulary=262)
    eos = tokenizer.eos_token_id
    rows = [[("How many?", False), ("7", True)], [("How?", False), ("77", True)]]
    rollout = models.tokenized_rows(rows, tokenizer, torch.device("cpu"))
    assert rollout.text == ("How many?7", "How?77")
    for row, (prompt, answer) in enumerate((("How many?", "7"), ("How?", "77"))):
        p, a = (tokenizer(text)["input_ids"] for text in (prompt, answer))
        assert rollout.tokens[row].tolist()[: len(p + a) + 1] == [*p, *a, eos]
        learned = range(len(p), len(p + a) + 1)
        assert rollout.mask[row].nonzero().flatten().tolist() == [*learned]
    sizes = tiny.Qwen2Sizes(vocabulary=262, positions=96, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48)
    lines: list[str] = []
    model = tiny.random_model(sizes.config(), seed=0)
    models.warm_start(model, tokenizer, iter(rows * 300), steps=300, batch_rows=2, report=lines.append)
    assert len(lines) == 3
    assert lines[-1].startswith("[warm start] step 300/300 loss 0.0")
