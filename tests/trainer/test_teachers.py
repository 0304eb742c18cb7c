"""Teachers: which one is asked about a problem, and what is refused before any weights are loaded."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import problem, tokenizer
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config

from grpo_fn.algo import distillation
from grpo_fn.core.groups import outcome_reward
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.trainer import teachers
from grpo_fn.trainer.sections import Teacher, model_source


def of_task(uid: int, task: str):
    return problem(uid, "?")._replace(meta={"task": task})


def step(tasks: list[str], size: int, width: int = 4) -> Groups:
    rows = len(tasks) * size
    mask = torch.ones(rows, width, dtype=torch.bool)
    tokens = torch.arange(rows)[:, None].expand(rows, width)
    rollout = Rollout(tokens, mask, torch.zeros(rows, width), ~mask[:, 0], ("",) * rows)
    value = torch.zeros(len(tasks), size)
    problems = tuple(of_task(i, task) for i, task in enumerate(tasks))
    return Groups(problems, rollout, outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {}))


def says(scale: float, asked: list, rollout: Rollout) -> Tensor:
    asked.append(rollout.tokens[:, 0].tolist())
    return scale * rollout.tokens.float()


def test_each_problem_is_read_by_the_teacher_of_its_key():
    asked: dict[str, list] = {"math": [], "code": [], "none": []}
    models = {name: partial(says, scale, asked[name]) for name, scale in (("math", -1.0), ("code", -2.0), ("none", 0))}
    key = partial(teachers.teacher_of_field, name="task")
    groups = step(["code", "math", "code"], 2)
    got = teachers.teacher_logp(groups, teachers=models, key=key)
    assert got[:, 0].tolist() == [0.0, -2.0, -2.0, -3.0, -8.0, -10.0]
    assert asked == {"code": [[0, 1, 4, 5]], "math": [[2, 3]], "none": []}  # one pass each, none of whom is not asked


def test_one_teacher_reads_everything_in_one_pass():
    asked: list = []
    key = teachers.one_teacher
    got = teachers.teacher_logp(step(["a", "b"], 2), teachers={"teacher": partial(says, -1.0, asked)}, key=key)
    assert got[:, 0].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert asked == [[0, 1, 2, 3]]


def test_a_problem_without_a_teacher_is_refused():
    key = partial(teachers.teacher_of_field, name="task")
    teachers.check_keys([of_task(0, "math")], {"math": ""}, key)
    for odd in (of_task(1, "code"), problem(2, "?")):
        with pytest.raises(ValueError, match=r"Teacher\.key: got '(code)?' for the problem '\?', wanted one of 'math'"):
            teachers.check_keys([of_task(0, "math"), odd], {"math": ""}, key)


def test_a_section_without_models_is_refused():
    with pytest.raises(ValueError, match=r"sections\.Teacher\.models: got none, wanted at least one"):
        Teacher(models={}, key=teachers.one_teacher, offload=False)
    with pytest.raises(ValueError, match=r"sections\.Teacher\.models: got a int, wanted a Hugging Face folder"):
        model_source(3, "sections.Teacher.models")


def shaped(vocabulary: int, positions: int) -> Qwen2Config:
    return Qwen2Config(vocab_size=vocabulary, max_position_embeddings=positions)


@pytest.mark.parametrize(
    ("vocabulary", "positions", "total", "complaint"),
    [
        (10, 64, None, None),
        (12, 128, None, None),  # a larger embedding than the tokenizer needs
        (9, 64, None, "got 't' with 9 rows in its embedding, wanted at least the policy's 10"),
        (10, 32, None, r"got 't', which reads 32 positions, wanted 64, or .*max_total_tokens = 32"),
        (10, 32, 32, None),
        (10, 32, 33, "which reads 32 positions, wanted 33"),
    ],
)
def test_a_teacher_reads_all_that_the_policy_may_write(vocabulary, positions, total, complaint):
    models, own = {"t": shaped(vocabulary, positions)}, shaped(10, 64)
    if complaint is None:
        teachers.check_teacher_shapes(models, own, total)
        return
    with pytest.raises(ValueError, match=complaint):
        teachers.check_teacher_shapes(models, own, total)


def test_the_first_token_that_differs_is_named(tmp_path: Path):
    own, folder = tokenizer(), tmp_path / "teacher"
    own.save_pretrained(folder)
    teachers.check_same_tokenizer("t", AutoTokenizer.from_pretrained(folder), own)
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    by_id = {i: token for token, i in stored["model"]["vocab"].items()}
    a, b = sorted(by_id)[5:7]
    stored["model"]["vocab"][by_id[a]], stored["model"]["vocab"][by_id[b]] = b, a
    path.write_text(json.dumps(stored))
    other = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match=rf"whose tokenizer has .* as token {a}, wanted the policy's .*; 2 of \d+"):
        teachers.check_same_tokenizer("t", other, own)


@pytest.mark.parametrize(
    ("f", "reads"),
    [
        (distillation.no_teacher, False),
        (partial(distillation.teacher_gap, coef=1.0), True),
        (partial(distillation.teacher_gap, coef=0.0), False),
        (partial(distillation.early_teacher_gap, coef=1.0, gamma=0.5), True),
        (partial(distillation.teacher_reweighted, lam=0.5, clip=0.2), True),
        (partial(distillation.teacher_reweighted, lam=0.0, clip=0.2), False),
    ],
)
def test_an_algorithm_that_learns_from_a_teacher_wants_one(f, reads):
    assert teachers.reads_gap(f) is reads
    teachers.check_distillation(f, object(), also=True)
    if reads:
        with pytest.raises(ValueError, match=r"train\.train\.teacher: got None with an algorithm that learns from a"):
            teachers.check_distillation(f, None, also=False)
    else:
        teachers.check_distillation(f, None, also=False)
        with pytest.raises(ValueError, match="wanted one"):
            teachers.check_distillation(f, None, also=True)
