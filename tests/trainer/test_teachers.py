"""Teachers: which one is asked about a problem, and what is refused before any weights are loaded."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes import problem, tokenizer
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.fsdp import WeightAverage
from grpo_fn.tasks import privileged
from grpo_fn.trainer import teachers
from grpo_fn.trainer.sections import Teacher
from grpo_fn.trainer.teachers import PromptChange


def section(models: dict, prompt=None) -> Teacher:
    return Teacher(
        models=models,
        key=teachers.one_teacher,
        prompt=prompt,
        encode_prompt=None,
        offload=False,
        relative_entropy=False,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": privileged.with_answer},
        {"models": {"teacher": teachers.start_model}},
    ],
    ids=["another_prompt", "the_policy"],
)
def test_entropies_are_relative_to_one_model_that_reads_the_policys_prompt(changes):
    one = replace(section({"teacher": "x"}), relative_entropy=True)
    assert one.relative_entropy
    with pytest.raises(
        ValueError, match=r"sections.Teacher.relative_entropy: got true with models .*, expected one model"
    ):
        replace(one, **changes)


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
    got = teachers.teacher_logp(groups, groups.rollout.logp_sampled, teachers=models, changes={}, key=key)
    assert got[:, 0].tolist() == [0.0, -2.0, -2.0, -3.0, -8.0, -10.0]
    assert asked == {"code": [[0, 1, 4, 5]], "math": [[2, 3]], "none": []}  # one pass each, none of whom is not asked


def test_a_problem_without_a_teacher_is_refused():
    key = partial(teachers.teacher_of_field, name="task")
    teachers.check_keys([of_task(0, "math")], {"math": ""}, key)
    for odd in (of_task(1, "code"), problem(2, "?")):
        with pytest.raises(
            ValueError, match=r"Teacher\.key: got '(code)?' for the problem '\?', expected one of 'math'"
        ):
            teachers.check_keys([of_task(0, "math"), odd], {"math": ""}, key)


def shaped(vocabulary: int, positions: int) -> Qwen2Config:
    return Qwen2Config(vocab_size=vocabulary, max_position_embeddings=positions)


@pytest.mark.parametrize(
    ("vocabulary", "positions", "total", "complaint"),
    [
        (10, 64, None, None),
        (9, 64, None, "got 't' with 9 rows in its embedding, expected at least the policy's 10"),
        (10, 32, None, r"got 't', which reads 32 positions, expected 64, or .*max_total_tokens = 32"),
        (10, 32, 32, None),
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
    with pytest.raises(ValueError, match=rf"whose tokenizer has .* as token {a}, expected the policy's .*; 2 of \d+"):
        teachers.check_same_tokenizer("t", other, own)


# -- other prompts


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def siblings(problem, samples, place):
    """The texts of the others; none for the second sample."""
    return None if place == 1 else problem.prompt + "".join(one.text for i, one in enumerate(samples) if i != place)


def group_of(*texts: str) -> Groups:
    """One problem with these completions, of which token t is sampled with log-prob -(row + 1) / (t + 1)."""
    width = 2 + max(map(len, texts))
    tokens = torch.tensor([[1, 2, *letters(text), *[0] * (width - 2 - len(text))] for text in texts])
    mask = (torch.arange(width) >= 2) & (tokens > 0)
    logp = -(1.0 + torch.arange(len(texts)))[:, None] / (1 + torch.arange(width))
    value = torch.arange(float(len(texts)))[None]
    rollout = Rollout(tokens, mask, torch.where(mask, logp, torch.nan), ~mask[:, 0], texts)
    return Groups(
        (problem(0, "q"),), rollout, outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {"right": value})
    )


def counting(seen: list, rollout: Rollout) -> Tensor:
    """-1, -2, ... of each row's tokens; what was read is kept."""
    seen += [row[: int(m.nonzero().max()) + 1].tolist() for row, m in zip(rollout.tokens, rollout.mask, strict=True)]
    return torch.where(rollout.mask, -rollout.mask.cumsum(-1).float(), 0.0)


def test_the_same_tokens_are_read_behind_the_other_prompt_and_other_rows_say_what_the_policy_says():
    seen: list = []
    groups = group_of("ab", "c", "def")
    old = groups.rollout.logp_sampled
    change = PromptChange(prompt=siblings, encode=letters, positions=None)
    got = teachers.logp_behind_prompts(groups, old, teacher=partial(counting, seen), change=change)
    assert seen == [letters("qcdef" + "ab"), letters("qabc" + "def")]
    mask = groups.rollout.mask
    assert got[0][mask[0]].tolist() == [-1.0, -2.0]
    assert got[2][mask[2]].tolist() == [-1.0, -2.0, -3.0]
    assert torch.equal(got[1][mask[1]], old[1][mask[1]])
    assert not got[~mask].any()
    shorter = teachers.logp_behind_prompts(
        groups, old, teacher=partial(counting, []), change=replace(change, positions=6)
    )
    assert torch.equal(shorter[mask], old[mask])  # rows that are longer than the teacher reads are not taught


def test_a_prompt_sees_rewards_and_their_parts_and_what_could_not_be_scored():
    groups, seen = group_of("ab", "c"), []

    def keep(problem, samples, place):
        seen.append((samples, place))

    unscored = groups.reward._replace(valid=torch.tensor([[True, False]]))
    assert teachers.teacher_prompts(groups._replace(reward=unscored), keep) == [None, None]
    samples, place = seen[1]
    assert place == 1
    assert [tuple(one) for one in samples] == [("ab", 0.0, {"right": 0.0}), ("c", None, {"right": 1.0})]


def test_the_live_policy_has_nothing_to_teach_without_another_prompt():
    with pytest.raises(ValueError, match=r"got teachers\.live, the policy as it is, with the prompt that the policy"):
        teachers.check_self_teachers(section({"teacher": teachers.live}))
    answered = partial(privileged.with_answer, template="{prompt} {privileged}")
    answering = section({"teacher": teachers.live}, answered)
    teachers.check_self_teachers(answering)
    assert answering.of_policy() == {"teacher": teachers.live}
    with pytest.raises(ValueError, match=r"got several teachers\.moving_average, expected one at most"):
        teachers.check_self_teachers(
            section({name: partial(teachers.moving_average, rate=rate) for name, rate in (("a", 0.1), ("b", 0.2))})
        )
    kinds = section({"a": "folder", "b": partial(teachers.moving_average, rate=0.1)})
    assert kinds.of_policy().keys() == {"b"}
    assert kinds.sources().keys() == {"a"}


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=rf"moving_average\.rate: got {rate}, expected above 0 and up to 1"):
        WeightAverage({}, rate=rate)


def asked_about(prompt, reach: int | None) -> None:
    problems = [problem(0, "2+3?")._replace(answer="5")]
    change = teachers.PromptChange(prompt=prompt, encode=letters, positions=reach)
    teachers.check_teacher_prompts(problems, change, name="t", size=2, parts=("right",), max_new_tokens=8)


def test_a_prompt_that_leaves_no_space_is_refused_before_the_run():
    answered = partial(privileged.with_answer, template="{prompt} {privileged}")  # "2+3? 5": 6 tokens
    asked_about(answered, 14)
    asked_about(answered, None)
    with pytest.raises(
        ValueError, match=r"got up to 14 tokens .* for the teacher 't' and the problem '2\+3\?', expected at"
    ):
        asked_about(answered, 13)
    sibling = partial(privileged.with_right_sibling, template="{prompt} {privileged}", least_reward=1.0)
    asked_about(sibling, 22)  # the other sample may be 8 tokens, too
    with pytest.raises(ValueError, match="got up to 22 tokens"):
        asked_about(sibling, 21)
    asked_about(lambda problem, samples, place: None, 1)
    with pytest.raises(
        ValueError, match=r"sections\.Teacher\.prompt: got a int for the problem '2\+3\?', expected a prompt"
    ):
        asked_about(lambda problem, samples, place: 3, None)


def test_another_chat_template_is_noticed():
    own, other, none = (deepcopy(tokenizer()) for _ in range(3))
    own.chat_template = "Q: {{ messages[0]['content'] }} A:"
    other.chat_template = "Q: {{ messages[0]['content'] }} B:"
    none.chat_template = None
    differs = partial(teachers.template_difference, "t", own=own, encode=hf.encode_prompt, prompts=["one", "two"])
    assert differs(own) is None
    assert teachers.template_difference("t", none, own, hf.bare_prompt, ["one"]) is None
    found = differs(other)
    assert "teacher 't': its own chat template has" in found
    assert "'B' as token" in found
    assert "the policy's 'A'" in found
    assert "sections.Teacher.encode_prompt = @hf.encode_prompt" in found
    assert "its own chat template has" in differs(none)
