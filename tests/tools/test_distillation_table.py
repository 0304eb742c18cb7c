"""tools/tables/distillation_table.py: steps to the teacher's accuracy, from run folders."""

import json
from pathlib import Path

import distillation_table
import pytest


def run(folder: Path, name: str, accuracy: dict[int, float]) -> None:
    (folder / name).mkdir()
    (folder / name / "summary.json").write_text("{}")
    with open(folder / name / "metrics.jsonl", "w") as file:
        for step, value in accuracy.items():
            row = {"step": step, "eval/accuracy": value, "time/total": 1.5}
            if step:
                row |= {"generation/rows": 16.0, "optimizer/step": 2.0 * step}
            file.write(json.dumps(row) + "\n")


def test_a_line_has_the_first_step_at_the_teachers_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "grpo_lr5e-05_s0", {0: 0.25, 1: 0.25, 2: 0.5, 4: 0.75})
    run(tmp_path, "opd_lr2e-4_s0", {0: 0.25, 1: 0.25, 2: 0.75, 4: 0.5})
    run(tmp_path, "opd_48_lr1e-4_s0", {0: 0.25, 1: 0.25, 2: 0.7, 4: 0.74})
    assert distillation_table.main([str(tmp_path), "--problems", "40"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[3] for line in lines] == ["5e-05", "0.0001", "0.0002"]
    assert [line[-3:] for line in lines] == [["4", "4", "6 |"], ["not reached", "2", "4 |"], ["2", "2", "4 |"]]
    assert [line[5:8] for line in lines][2] == ["0.250", "0.750", "0.500"]  # before, at its best, after


def test_the_table_of_students_stands_in_a_page_beside_teachers_of_another_folder(tmp_path: Path) -> None:
    small, page = tmp_path / "small", tmp_path / "README.md"
    small.mkdir()
    run(tmp_path, "grpo_lr5e-05_s0", {0: 0.25, 1: 0.25, 4: 0.75})
    run(small, "opd_lr2e-4_s0", {0: 0.25, 1: 0.25, 2: 0.75})
    page.write_text("# head\n\n<!-- runs of small -->\nold\n<!-- end -->\nbelow\n")
    command = [str(small), "--teachers", str(tmp_path), "--page", str(page), "--problems", "40"]
    assert distillation_table.main(command) == 0
    text = page.read_text()
    assert "| opd | 16 | 2 | 0.0002 | 0 | 0.250 | 0.750 | 0.750 | 2 | 0.750 | 2 | 2 | 4 |" in text
    assert text.endswith(" |\n\n<!-- end -->\nbelow\n")
    assert "old" not in text
    assert distillation_table.main(command) == 0
    assert page.read_text() == text


def test_a_teacher_of_another_rate_is_named_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "grpo_lr2e-4_s0", {0: 0.25, 1: 0.25, 4: 0.75})
    run(tmp_path, "exact_lr1e-3_s0", {0: 0.25, 1: 0.25, 2: 0.5})
    assert distillation_table.main([str(tmp_path)]) == 2
    assert "got no run grpo_lr5e-05_sSEED" in capsys.readouterr().err
    assert distillation_table.main([str(tmp_path), "--teacher_rate", "2e-4"]) == 0
    assert "| exact | 16 | 2 | 0.001 | 0 | 0.250 | 0.500 | 0.500 | 2 | 0.750 | not reached | not reached |  |" in (
        capsys.readouterr().out
    )


def test_a_page_without_a_place_for_the_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "grpo_lr5e-05_s0", {0: 0.25, 1: 0.25, 4: 0.75})
    assert distillation_table.main([str(tmp_path), "--page", str(tmp_path / "none.md")]) == 2
    assert "without <!-- runs of" in capsys.readouterr().err


def test_a_folder_without_a_teacher_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distillation_table.main([str(tmp_path)]) == 2
    assert "wanted that of each teacher" in capsys.readouterr().err
