"""However many ranks there are, a run is one run elsewhere, and goes on as that one."""

import json
from pathlib import Path

import pytest
from e2e.faults import job
from e2e.running import command

MIRRORED = """
from __gin__ import dynamic_registration
from e2e import noting
from grpo_fn.trainer import sections

sections.Logging.mirror = @noting.mirror()
"""


@pytest.mark.slow
def test_one_run_is_opened_for_all_ranks_and_again_under_its_id(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mirrored.gin").write_text(MIRRORED)
    opened = []
    for steps in (1, 2):  # the second goes on from the first
        argv = command(cache, tmp_path / "run", "--gin_file", str(tmp_path / "mirrored.gin"), "--force", STEPS=steps)
        over = job(tmp_path / f"job{steps}", 2, argv)
        assert over.code == 0, over.everything()
        notes = (tmp_path / "run" / "wandb").glob("opened-*")
        opened.append([json.loads(path.read_text()) for path in sorted(notes, key=lambda path: path.stat().st_mtime)])
    assert [len(found) for found in opened] == [1, 2]
    first, again = opened[1]
    assert (first["rank"], again["rank"]) == ("0", "0")
    assert first["id"] == again["id"] == (tmp_path / "run" / "wandb" / "id").read_text()
    assert first["watched"] == str(tmp_path / "run" / "tensorboard")
    assert first["sync_tensorboard"] is True
    assert (first["mode"], first["name"]) == ("offline", "run")
    assert first["config"]["optimizer.adamw.lr"] == 1e-3
