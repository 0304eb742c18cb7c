"""Decodes with compiled steps and with steps as they are written, and says how they differ.

A program of its own: what tests put around functions to check shapes cannot be traced.
"""

import copy
import json
import sys
from dataclasses import replace
from functools import partial

import torch
from test_continuous_batching import TEXTS, family, held
from test_local_sampler import CHOICES, KEY, completions, problems

from grpo_fn.core.types import Rollout
from grpo_fn.shell.model.blocks import recompilations
from grpo_fn.shell.sampler.local.cuda_steps import compile_decode_parts
from grpo_fn.shell.sampler.local.joined_projections import joined_model
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler

# Prompts, and completions of each. Of the first shape all sizes differ: what torch takes for one size it builds again.
ASKED = ((TEXTS, 3), (TEXTS[:3], 2), (TEXTS[:1], 5))


def compared(name: str, choice: str, asked: int) -> dict[str, list]:
    """What one family of models gives with one of the token samplers, for the first `asked` of ASKED, each twice."""
    torch._dynamo.reset()
    before = recompilations().built
    s = replace(family(name, max_rows=7), token_sampler=CHOICES[choice])
    module = copy.deepcopy(s.model)
    made = held(module)  # asks the model as it is written whether it is fit, and compiles then, as samplers do
    made.engine.step_model = joined_model(module)
    made.engine.code = compile_decode_parts(made.engine.step_model)
    other = LocalSampler(**{**vars(s), "model": module, "shared": made})
    found: dict[str, list] = {"same": [], "apart": [], "built": []}
    for texts, group_size in ASKED[:asked] * 2:
        one, two = (x.sample(problems(texts), group_size, key=KEY) for x in (s, other))
        found["same"].append(completions(one) == completions(two))
        found["apart"].append(apart(one, two))
        found["built"].append(recompilations().built - before)
    return found


def apart(one: Rollout, two: Rollout) -> float:
    """The most that log-probs differ by."""
    return float((one.logp_sampled - two.logp_sampled).abs().max()) if one.tokens.shape == two.tokens.shape else 1e9


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.compile = partial(torch.compile, backend=sys.argv[1])
    families = json.loads(sys.argv[3])
    print(json.dumps({name: compared(name, sys.argv[2], asked) for name, asked in families.items()}))
