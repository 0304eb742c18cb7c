"""Functions of one group or one row refuse a batch, and name torch.func.vmap; under it they take one.

In a process without the tests' checks of shapes, which would refuse it first.
"""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import torch
sys.path[:0] = json.loads(sys.argv[1])
from catalogue import bound, token_losses
from grpo_fn.algo import advantage, losses
from grpo_fn.core.types import Batch

P, G = 3, 4
reward, valid = torch.rand(P, G), torch.ones(P, G, dtype=torch.bool)
batch = Batch(torch.ones(P, G).long(), valid, reward, reward, reward, reward, reward, valid, valid.long())
KINDS = [(bound(advantage, "reward", "valid"), (reward, valid)), (token_losses(), (reward, batch))]
for table, given in KINDS:
    for name, f in table.items():
        try:
            f(*given)
        except ValueError as error:
            said = str(error)
        else:
            said = "taken"
        whole = torch.func.vmap(f)(*given)
        print(json.dumps([name, said, list((whole[0] if isinstance(whole, tuple) else whole).shape)]))
"""


def test_a_batch_is_refused_with_the_way_to_take_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(sys.path)], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 17
    for name, said, shape in found:
        assert "(3, 4), expected th" in said, name
        assert "torch.func.vmap" in said, name
        assert shape == [3, 4], name
