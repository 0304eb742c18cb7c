"""The lens as a user points it at a run."""

import shutil
from pathlib import Path

import compare_algorithms as tool
import pytest
import torch
from e2e.running import board, command, finish
from lens import lens
from test_page import Reader

from grpo_fn.shell.logging import rollout_store
from grpo_fn.trainer import recording


def test_every_preset_is_seen_in_a_stored_step(whole: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert tool.main([str(whole), "--step", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    page = Reader(out.read_text())
    for name in recording.preset_names():
        assert name in said
        assert any(name in text for text in page.texts)
    assert "gdpo: left out, weights: got parts ['boxed', 'correct']" in said  # this run has others
    assert "gradient noise scale" in said
    assert any("Where they disagree" in text for text in page.texts)
    assert not [text for text in page.texts if "</" in text], "markup that is shown as text"


def test_on_policy_the_presets_without_a_clip_of_their_own_agree_on_direction(whole: Path, capsys) -> None:
    args = tool.flags().parse_args([str(whole), "--step", "2", "--on_policy"])
    seen = lens.look(args)
    cosine = dict(zip(seen.names, lens.compare_algorithms.cosines(seen.signal)[0].tolist(), strict=True))
    assert cosine["this run"] == pytest.approx(1.0)
    assert cosine["dr_grpo"] == pytest.approx(1.0)  # what the small run is
    assert cosine["cispo"] < 1 - 1e-6
    assert seen.rows is None


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


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere", "--step", "1"], "got nowhere without config.gin, wanted a run folder"),
        (["RUN", "--step", "99"], "got --step 99, wanted one whose rollout is stored: [1, 2, 3, 4, 5, 6]"),
        (["RUN", "--step", "1", "--parameters", "no_such_part"], "got 'no_such_part', wanted part of a name such as"),
        (["RUN", "--step", "1", "--policy", "RUN/rollouts"], "got"),
    ],
)
def test_bad_input_is_one_line(whole: Path, capsys: pytest.CaptureFixture, argv: list[str], complaint: str) -> None:
    assert tool.main([word.replace("RUN", str(whole)) for word in argv]) == 2
    assert complaint in capsys.readouterr().err
    assert not (whole / "lens").exists()


def test_a_run_can_look_through_the_lens_as_it_goes(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(command(cache, run, sections__Logging__compare_presets_every=3), tmp_path / "out") == 0, (
        tmp_path / "out"
    ).read_text()
    events = board(run)
    assert [e.step for e in events.Images("lens/cosines")] == [3, 6]
    text = events.Tensors("lens/presets/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "dapo" in text
    weights = [path / "model" / "model.safetensors" for path in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()  # looking changes nothing
    shutil.rmtree(run)
