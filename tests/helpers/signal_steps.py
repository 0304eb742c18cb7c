"""Steps to look at token by token: real texts through a real tokenizer, and figures made for the occasion."""

from collections.abc import Sequence

import torch
from batches import UNMOVED, policy_objective
from fakes import tokenizer
from torch import Tensor

from grpo_fn.algo.step import Experience
from grpo_fn.core import prng
from grpo_fn.core.batch import make_batch, outcome_reward
from grpo_fn.core.problem import Problem, Turn
from grpo_fn.core.types import Groups, Rollout, Scores
from grpo_fn.lab import token_page

CLIPPED = policy_objective(beta=0.01)
HOSTILE = [
    "<script>document.title = 'owned'; window.owned = 1</script>",
    "<img src=x onerror=\"window.owned = 1\"><svg/onload='window.owned=1'>",
    "\"'><b>bold</b> &lt;already escaped&gt; </span></article></main> -->",
    "zero \x00, bell \x07, escape \x1b[31m, delete \x7f, vertical\x0b, return\r\n, next line \x85",
    "right \u202eto left\u202c, \u2066isolated\u2069, \u05e9\u05dc\u05d5\u05dd, \u0645\u0631\u062d\u0628\u0627 \u200f",
    "no\u00a0break, zero\u200bwidth, soft\u00adhyphen, \ufeffmark, line\u2028separator, private \ue000",
    "\U0001f469\u200d\U0001f52c \u00e9 \u4f60\u597d, half a character \ufffd and a family \U0001f468\u200d\U0001f467",
    "Z\u0351\u036b\u0343\u0363a\u0327\u0301l\u0308\u0310g\u030d\u0369o " + "\u0301" * 40,
    "tab\there,  two spaces,   three, end \n\n\tindented ",
    "{{constructor.constructor('window.owned=1')()}} ${window.owned=1} javascript:window.owned=1",
    "@import url(http://x.invalid) --a: 1; } </style><style>body { display: none }",
    'style="background:url(http://x.invalid/a.png)" <link rel=stylesheet href=//x.invalid> <iframe src=//x.invalid>',
    "x" * 5000,
    "]]><!--<!DOCTYPE html><html><body onload=window.owned=1>",
]

LISTING = "".join(f"{i:>3} apples = {i * 7} pears\n" for i in range(40))
# Two prompts with two episodes each: tools, an error, a long observation, a limit, a turn that cannot be scored.
EPISODES = [
    [
        [
            Turn("12 + 30 = <tool>12+30</tool>", 0, "42", 0.0, "s0", calls=1),
            Turn("twice: <tool>42/0</tool><tool>42*2</tool>", 0, "84", 0.25, "s1", calls=2, error="division by zero"),
            Turn("\\boxed{84}", 0, "", 1.0, "s2"),
        ],
        [Turn("<tool>list</tool>", 0, LISTING, 0.5, "s0", calls=1), Turn("I do not know.", 0, "Wrong.", 0.0, "s1")],
    ],
    [
        [Turn("a guess: 7", 0, "higher", -0.5, "s0"), Turn("8 or 9 or 10 or", 0, "", 0.0, "s1", limit="turn_tokens")],
        [Turn("a guess: 9", 0, "higher", None, "s0"), Turn("another guess: 10", 0, "", 1.0, "s1")],
    ],
]


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special() -> set[int]:
    return set(tokenizer().all_special_ids)


def episode(turns: Sequence[Turn]) -> tuple[list[int], list[bool], tuple[Turn, ...]]:
    """Its ids behind the opening, their mask, and the turns with their lengths; the last observation is not read."""
    ids, mask, found = [], [], []
    for i, turn in enumerate(turns):
        wrote = [*tokenizer().encode(turn.text), tokenizer().eos_token_id]
        read = tokenizer().encode(f"\n{turn.observation}\n") if i + 1 < len(turns) else []
        ids += wrote + read
        mask += [True] * len(wrote) + [False] * len(read)
        found.append(turn._replace(length=len(wrote)))
    return ids, mask, tuple(found)


def step(
    prompts: Sequence[str], texts: Sequence[Sequence[str | Sequence[Turn]]], seed: int = 0
) -> tuple[Experience, Scores]:
    """These answers to these prompts, equally many to each, and a policy that has moved since it gave them.

    An answer may be the turns of an episode; then all are.
    """
    end = tokenizer().eos_token_id
    asked = [tokenizer().encode(p) for p, answers in zip(prompts, texts, strict=True) for _ in answers]
    episodes = [episode([Turn(a, 0, "", 0.0, "")] if isinstance(a, str) else a) for answers in texts for a in answers]
    turns = tuple(of for *_, of in episodes)
    said = [ids for ids, *_ in episodes]
    width, rows = max(len(a) + len(s) for a, s in zip(asked, said, strict=True)), len(said)
    tokens, mask = torch.full((rows, width), end), torch.zeros(rows, width, dtype=torch.bool)
    for b, (a, (s, written, _)) in enumerate(zip(asked, episodes, strict=True)):
        tokens[b, : len(a) + len(s)] = torch.tensor([*a, *s])
        mask[b, len(a) : len(a) + len(s)] = torch.tensor(written)
    keys = iter(prng.split(prng.key(seed, device="cpu"), 5))

    def between(low: float, high: float, *shape: int) -> Tensor:
        drawn = prng.uniform(next(keys), torch.Size(shape).numel(), dtype=torch.float64, low=low, high=high)
        return drawn.view(shape)

    old = torch.where(mask, between(-3.0, -0.05, rows, width), torch.nan)
    logp = torch.where(mask, (old + 0.35 * between(-1.0, 1.0, rows, width) ** 3 * 2).clamp(max=0), 0.0)
    ref = old + 0.2 * between(-1.0, 1.0, rows, width)
    p, g = len(prompts), len(texts[0])
    value = between(0.0, 1.0, p, g).round(decimals=1)
    parts = {"correct": (value > 0.5).double(), "boxed": 1 - (value > 0.5).double()}
    adv = (value - value.mean(-1, keepdim=True))[..., None] * mask.view(p, g, width)
    problems = tuple(Problem(100 + i, prompt, "", {}) for i, prompt in enumerate(prompts))
    truncated = torch.arange(rows) % 5 == 4
    spoken = tuple(of[-1].text for of in turns)
    rollout = Rollout(tokens, mask, old, truncated, spoken, () if isinstance(texts[0][0], str) else turns)
    reward = outcome_reward(value, torch.ones(p, g, dtype=torch.bool), parts)
    keep = torch.arange(rows).view(p, g) % 7 != 6  # a filter leaves some out
    batch = make_batch(rollout, keep, adv, old, ref, ref)
    scores = Scores(logp, torch.where(mask, between(0.0, 3.0, rows, width), 0.0))
    return Experience(Groups(problems, rollout, reward), adv, batch), scores


def looked_at(experience: Experience, scores: Scores, rows: int = 1000) -> token_page.TokenReport:
    """As the page gets it."""
    signal, seen = token_page.signal_of_step(experience.batch, scores, CLIPPED, UNMOVED, minibatches=1)
    return token_page.token_report(experience, signal, seen, decode, special(), rows=rows)
