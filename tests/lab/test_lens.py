"""The lens as a user points it at a run."""

from pathlib import Path

import pytest
import torch
from test_page import Reader
from test_token_page import Reader as TokenReader

from grpo_fn.lab import lens, presets
from grpo_fn.shell.logging import rollout_store


def test_every_preset_is_seen_in_a_stored_step(whole: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert lens.main([str(whole), "--step", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    page = Reader(out.read_text())
    for name in presets.preset_names():
        assert name in said
        assert any(name in text for text in page.texts)
    assert "gdpo: left out, weights: got parts ['boxed', 'correct']" in said  # this run has others
    assert any("Where they disagree" in text for text in page.texts)
    assert not [text for text in page.texts if "</" in text], "markup that is shown as text"


def test_on_policy_the_presets_without_a_clip_of_their_own_agree_on_direction(whole: Path, capsys) -> None:
    seen = presets.view_step(whole, 2, policy=str(whole), on_policy=True, reference=None)
    cosine = dict(zip(seen.names, presets.cosines(seen.signal)[0].tolist(), strict=True))
    assert cosine["this run"] == pytest.approx(1.0)
    assert cosine["dr_grpo"] == pytest.approx(1.0)  # what the small run is
    assert cosine["cispo"] < 1 - 1e-6


@pytest.mark.parametrize("flags", [[], ["--on_policy"]])
def test_the_tokens_of_a_stored_step_are_a_page(whole: Path, tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "signal.html"
    argv = [str(whole), "--step", "4", "--out", str(tmp_path / "lens.html"), "--token_report", str(out), *flags]
    assert lens.main(argv) == 0
    page = TokenReader(out.read_text())
    rows = rollout_store.load_rollouts(whole / "rollouts" / "step_000004.jsonl.gz")
    assert len(page.tokens) == sum(row["length"] for row in rows)
    names = {found.get("data-name") for _, found in page.tags}
    assert "dlogp" in names
    assert ("entropy, nats" in names) != bool(flags)  # it is not among what is stored


def test_a_stored_step_comes_back_as_it_was(whole: Path) -> None:
    rows = rollout_store.load_rollouts(whole / "rollouts" / "step_000003.jsonl.gz")
    groups = rollout_store.groups_from_rows(rows)
    assert groups.reward.value.shape == (4, 4)
    for b, row in enumerate(rows):
        end = len(row["tokens"])
        assert groups.rollout.tokens[b, :end].tolist() == row["tokens"]
        assert groups.rollout.mask[b, :end].int().tolist() == row["mask"]
        assert not groups.rollout.mask[b, end:].any()
        assert groups.rollout.logp_sampled[b][groups.rollout.mask[b]].tolist() == row["logp_sampled"]
        assert groups.problems[b // 4].uid == row["uid"]
        assert float(groups.reward.parts["digits"][b // 4, b % 4]) == pytest.approx(row["parts"]["digits"])
    assert groups.rollout.truncated.dtype == torch.bool


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere", "--step", "1"], "got nowhere without config.gin, expected a run folder"),
        (["RUN", "--step", "99"], "got --step 99, expected one whose rollout is stored: [1, 2, 3, 4, 5, 6]"),
        (["RUN", "--step", "1", "--policy", "RUN/rollouts"], "got"),
    ],
)
def test_bad_input_is_one_line(whole: Path, capsys: pytest.CaptureFixture, argv: list[str], complaint: str) -> None:
    assert lens.main([word.replace("RUN", str(whole)) for word in argv]) == 2
    assert complaint in capsys.readouterr().err
    assert not (whole / "lens").exists()
