"""Rollouts of episodes are cut, joined, packed and stored with their turns."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.batch import concat_rollouts, outcome_reward, pack_rollout, select_rows, unpack_rollout
from grpo_fn.core.checksums import rollout_checksums
from grpo_fn.core.problem import LIMITS, Problem, Turn
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import completions_of
from grpo_fn.shell.logging.rollout_store import groups_from_rows, load_rows, store_rollouts

turns = st.builds(
    Turn,
    st.text(max_size=3),
    st.integers(1, 3),
    st.text(max_size=3),
    st.none() | st.floats(-2, 2, width=32),
    st.text("0123", max_size=3),
    st.integers(0, 2),
    st.text(max_size=2),
    st.sampled_from(("", *LIMITS)),
    st.text(max_size=4),
)


@st.composite
def rollouts(draw: st.DrawFn, episodes: bool | None = None) -> Rollout:
    rows = [draw(st.lists(turns, min_size=1, max_size=3)) for _ in range(draw(st.integers(1, 3)))]
    many = draw(st.booleans()) if episodes is None else episodes
    width = 1 + max(sum(turn.length for turn in row) for row in rows)
    sampled = torch.tensor([[0 < t <= sum(turn.length for turn in row) for t in range(width)] for row in rows])
    logp = torch.where(sampled, -torch.rand(sampled.shape, generator=torch.Generator().manual_seed(width)), 0.0)
    ended = torch.tensor([bool(row[-1].limit) for row in rows])
    text = tuple(row[-1].text for row in rows)
    return Rollout(sampled.long() * 3, sampled, logp, ended, text, tuple(map(tuple, rows)) if many else ())


@given(rollouts())
def test_unpacked_groups_are_the_packed_ones(rollout: Rollout) -> None:
    got = unpack_rollout(pack_rollout(rollout))
    assert got[4:] == rollout[4:]
    assert all(torch.equal(a, b) for a, b in zip(got[:4], rollout[:4], strict=True))
    assert unpack_rollout(pack_rollout(rollout)[:5]).turns == ()


@given(st.booleans().flatmap(lambda many: st.lists(rollouts(many), min_size=1, max_size=3)))
def test_joined_rows_are_cut_apart_again(parts: list[Rollout]) -> None:
    whole, first = concat_rollouts(parts), 0
    assert len(whole.turns) in (0, len(whole.text))
    for part in parts:
        rows = range(first, first + len(part.text))
        assert completions_of(select_rows(whole, rows)) == completions_of(part)
        first = rows.stop


@given(rollouts(), st.floats(0, 1, width=32))
def test_stored_episodes_come_back(rollout: Rollout, value: float) -> None:
    rows = len(rollout.text)
    grid = torch.full((rows, 1), value)
    reward = outcome_reward(grid, torch.ones(rows, 1).bool(), {"part": grid})
    with TemporaryDirectory() as folder:
        asked = [Problem(uid, "?", "", {}) for uid in range(rows)]
        store_rollouts(Path(folder), 1, asked, 1, rollout, reward, grid, keep=1)
        got = groups_from_rows(load_rows(Path(folder) / "step_000001.jsonl.gz")).rollout
    assert got.turns == rollout.turns
    assert rollout_checksums(got) == rollout_checksums(rollout)


@given(rollouts(episodes=True), st.data())
def test_an_answer_that_changes_changes_the_checksum(rollout: Rollout, data: st.DataObject) -> None:
    b = data.draw(st.integers(0, len(rollout.turns) - 1))
    n = data.draw(st.integers(0, len(rollout.turns[b]) - 1))
    changed = [list(row) for row in rollout.turns]
    changed[b][n] = changed[b][n]._replace(answer=changed[b][n].answer + "!")
    assert rollout_checksums(rollout._replace(turns=tuple(map(tuple, changed)))) != rollout_checksums(rollout)
