"""Any checkpoint becomes an ordinary model folder: the weights that training had, to the bit."""

from pathlib import Path

import pytest
import torch
from e2e.running import command, finish
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fn import export
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.model import hf
from grpo_fn.trainer.model_source import check_fits, copy_checkpoint_weights, locate, weights_of

LORA = ("--gin_file", "scale/lora.gin")
PROMPT = "12 + 7 = "


@pytest.fixture(scope="module")
def adapted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    assert finish(command(cache, folder / "run", *LORA), folder / "out") == 0, (folder / "out").read_text()
    return folder / "run"


def exported(source: Path, out: Path, *flags: str) -> Path:
    assert export.main([str(source), "--out", str(out), *flags]) == 0
    return out


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
def says(folder: Path) -> Tensor:
    """What transformers makes of the folder alone."""
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


def test_the_last_checkpoint_is_the_model_of_the_run_and_an_earlier_one_another(whole: Path, tmp_path: Path) -> None:
    out = exported(whole, tmp_path / "out")
    assert {p.name for p in out.iterdir()} == {p.name for p in (whole / "model").iterdir()}
    assert same(weights(out), weights(whole / "model"))
    assert torch.equal(says(out), says(whole / "model"))
    earlier = weights(exported(whole / "checkpoints" / "step_4", tmp_path / "earlier"))
    found = store.read_tensors(whole / "checkpoints" / "step_4", "weights.")
    assert same(earlier, {name: found[name] for name in earlier})
    assert not same(earlier, weights(out))


def test_adapters_are_merged_into_the_model_that_the_run_began_with(adapted: Path, tmp_path: Path) -> None:
    assert same(weights(exported(adapted, tmp_path / "out")), weights(adapted / "model"))


@pytest.mark.parametrize(("run", "step"), [("whole", 6), ("adapted", 4)])
def test_a_model_takes_what_is_exported(run: str, step: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    saved = request.getfixturevalue(run) / "checkpoints" / f"step_{step}"
    found = locate(str(saved), warn=pytest.fail)
    check_fits(saved, found.source.config())
    model = hf.load_model(found.source.folder(), dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    copy_checkpoint_weights(model, saved)
    ours, theirs = weights_of(model), weights(exported(saved, tmp_path / "out"))
    assert same({name: ours[name].detach() for name in theirs}, theirs)


def test_adapters_of_another_model_are_refused(adapted: Path) -> None:
    saved = adapted / "checkpoints" / "step_6"
    config = locate(str(saved), warn=pytest.fail).source.config()
    for change in ({"hidden_size": 64}, {"intermediate_size": 64}):
        other = type(config)(**{**config.to_dict(), **change})
        with pytest.raises(ValueError, match=r"of another model: .*lora_"):
            check_fits(saved, other)


def test_the_adapter_folder_on_its_base_says_what_the_merged_model_says(adapted: Path, tmp_path: Path) -> None:
    folder = exported(adapted, tmp_path / "adapter", "--adapter")
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    named = locate(str(adapted), warn=print, exported=False).source.folder()
    base = AutoModelForCausalLM.from_pretrained(named, dtype=torch.float32)
    merged = exported(adapted, tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(merged)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        plain = base(ids).logits
        on_top = PeftModel.from_pretrained(base, folder)(ids).logits
    torch.testing.assert_close(on_top, says(merged), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain, on_top, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "flags", "said"),
    [
        ("nowhere", [], "expected a run folder or a checkpoint"),
        ("", ["--adapter"], "expected a checkpoint of a run with LoRA"),
    ],
)
def test_a_folder_that_cannot_be_exported_is_named_and_nothing_is_written(
    whole: Path, tmp_path: Path, source: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(whole / source), "--out", str(tmp_path / "out"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert export.main([str(whole), "--out", str(tmp_path)]) == 2
    assert "which exists" in capsys.readouterr().err
