"""The functions that the other tests find, and the page that lists them: nothing is missed, nothing is made up."""

import re
import subprocess
import sys
from pathlib import Path

import catalogue
import page_tables
import pytest
from catalogue import KINDS

from grpo_fn.algo import corrections, credit, distillation, losses, objective, supervised

# What a module defines besides functions of a kind, for others to use.
HELPERS = {
    credit: {
        *("token_advantages", "over_tokens", "first_token", "zero_outside_mask", "moments", "standardise"),
        *("discounted_returns", "turns_taken", "by_state", "turns_over_tokens"),
    },
    losses: {"sampled_values", "loss_diagnostics", "log_ratio", "capped_exp", "ratio", "discounted_to_go"},
    objective: {"policy_objective", "objective_value", "with_teacher_divergence", "next_gains"},
    supervised: {"cross_entropy", "supervised_step", "learn_given"},
    distillation: {"in_part"},
    corrections: {
        *("k1_divergence", "k2_divergence", "k3_divergence"),
        *("row_sum", "row_mean", "row_max", "token_ratio", "row_ratio"),
    },
}
MODULES = list({kind[0]: None for kind in KINDS})
each_module = pytest.mark.parametrize("module", MODULES, ids=[m.__name__ for m in MODULES])


@each_module
def test_every_public_function_of_a_module_has_a_signature_of_its_kinds(module):
    found = set().union(*(catalogue.functions(m, *positional) for m, positional in KINDS if m is module))
    assert set(catalogue.public(module)) - found == HELPERS.get(module, set())


# -- the page of the catalogue

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "algorithms" / "catalogue.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_docstrings_say():
    path = "docs/algorithms/catalogue.md"
    assert page_tables.with_tables(PAGE) == PAGE, f"{path} differs from the docstrings: run python tools/tables {path}"


@pytest.mark.parametrize(("module", "positional"), KINDS, ids=[f"{k[0].__name__}({','.join(k[1])})" for k in KINDS])
def test_the_page_has_a_table_of_every_kind(module, positional):
    words = f"{module.__name__.rpartition('.')[2]} ({', '.join(positional)})"
    (found,) = [place[0] for place in page_tables.PLACE.finditer(PAGE) if place[2] == words]
    lines = dict(re.findall(r"^\| `(\w+)(?:\(([\w, ]*)\))?` \|", found, re.MULTILINE))
    expected = {
        name: ", ".join(catalogue.signature(f)[1]) for name, f in catalogue.functions(module, *positional).items()
    }
    assert lines == expected


@pytest.mark.slow
def test_the_example_of_the_page_runs_with_nothing_configured(tmp_path):
    """In a fresh process: the learning signal of one group is there, and neither gin nor a model library was needed."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    checks = """
import sys
assert torch.allclose(signal.logp, -batch.adv / 12), signal.logp
assert not signal.entropy.any()
assert not {"gin", "transformers", "tensorboard"} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", example + checks], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[-0.0722")
