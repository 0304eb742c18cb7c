"""The finder the other tests rest on: it misses nothing and does not guess."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import catalogue
import pytest

from grpo_fn.algo import advantage, aggregation, controllers, credit, importance, kl, losses, masking
from grpo_fn.algo import masking as filters

ROOMS = [
    (
        advantage,
        ("reward", "valid"),
        {"group_normalized", "centered", "leave_one_out", "leave_one_out_normalized", "pass_at_k", "max_rl"},
    ),
    (
        credit,
        ("reward", "drift", "mask"),
        {"outcome", "outcome_minus_kl", "reward_to_go", "per_part", "token_whitened", "row_whitened"},
    ),
    (filters, ("rollout", "adv"), {"finished", "comparable"}),
    (masking, ("batch", "key"), {"nothing", "clip_cov", "kl_cov"}),
    (kl, ("logp", "row"), {"k1_ratio", "k2", "k3", "k3_ratio"}),
    (
        losses,
        ("logp", "row"),
        {
            *("reinforce", "clipped_ratio", "dual_clip", "sequence_ratio", "sequence_ratio_token", "cispo", "sapo"),
            *("gmpo", "dppo_tv", "clip_cov", "kl_cov"),
        },
    ),
    (
        importance,
        ("logp", "row"),
        {
            *("none", "truncated", "masked", "sequence_truncated", "sequence_masked", "off_policy_sequence_mask"),
            "both",
        },
    ),
    (aggregation, ("mask", "totals"), {"token_mean", "sequence_mean", "constant_length"}),
    (controllers, ("gain", "measured"), {"fixed", "adaptive_kl", "adaptive_entropy"}),
]
# What a room defines besides its functions, for others to use.
HELPERS = {credit: {"over_tokens", "first_token", "kept", "moments", "standardised"}}


@pytest.mark.parametrize(("room", "positional", "known"), ROOMS, ids=[r[0].__name__ for r in ROOMS])
def test_every_public_function_of_a_room_has_its_signature(room, positional, known):
    found = set(catalogue.functions(room, *positional))
    assert known <= found
    assert set(catalogue.public(room)) - found == HELPERS.get(room, set())


@pytest.mark.parametrize("room", [r[0] for r in ROOMS], ids=[r[0].__name__ for r in ROOMS])
def test_knobs_have_no_default(room):
    for f in catalogue.public(room).values():
        assert not f.__defaults__
        assert not f.__kwdefaults__


def test_an_unknown_knob_is_refused_by_name():
    room = ModuleType("room")

    def novel(reward, valid, *, sharpness):
        return reward

    novel.__module__ = "room"
    room.novel = novel
    with pytest.raises(LookupError, match=r"sharpness.*tests/catalogue\.py"):
        catalogue.bound(room, "reward", "valid")


# -- the page of the catalogue

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "catalogue.md").read_text(encoding="utf-8")
FUNCTIONS = [
    (room, name, f) for room, positional, _ in ROOMS for name, f in catalogue.functions(room, *positional).items()
]


def section(room: ModuleType) -> str:
    """The page's part about a room."""
    leaf = room.__name__.rpartition(".")[2]
    (found,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if f"`{leaf}.py`" in part.split("\n")[0]]
    return found


@pytest.mark.parametrize(("room", "name", "f"), FUNCTIONS, ids=[f"{r.__name__[8:]}.{n}" for r, n, _ in FUNCTIONS])
def test_every_function_has_its_line_on_the_page_with_its_knobs(room, name, f):
    knobs = ", ".join(catalogue.signature(f)[1])
    call = f"`{name}({knobs})`" if knobs else f"`{name}`"
    assert f"| {call} |" in section(room), f"docs/catalogue.md has no line that begins with {call}"


@pytest.mark.parametrize("room", [r[0] for r in ROOMS], ids=[r[0].__name__ for r in ROOMS])
def test_the_page_lists_nothing_that_is_not_there(room):
    listed = re.findall(r"^\| `(\w+)[(`]", section(room), re.MULTILINE)
    assert sorted(listed) == sorted(name for r, name, _ in FUNCTIONS if r is room)


def test_every_preset_has_its_line_on_the_page():
    listed = re.findall(r"^\| `(\w+)\.gin` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (PROJECT / "gin" / "algo").glob("*.gin"))


def test_what_the_page_cites_the_function_cites_too():
    """A function's docstring names the paper that its line does."""
    for room, name, f in FUNCTIONS:
        (line,) = [x for x in section(room).splitlines() if x.startswith((f"| `{name}`", f"| `{name}("))]
        source = line.split(" | ")[-2 if room is not masking else -1]
        for paper in re.findall(r"arXiv:\d{4}\.\d{5}", source):
            assert paper in (f.__doc__ or "") + (room.__doc__ or ""), f"{name}: {paper} is not in its docstring"


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
