"""Any checkpoint becomes an ordinary model folder: the weights that training had, to the bit."""

import shutil
from pathlib import Path

import export
import pytest
import torch
from crew import crew
from e2e.running import command, finish
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.model import hf
from grpo_fn.shell.world import World
from grpo_fn.trainer.model_source import check_fits, copy_checkpoint_weights, find_run_checkpoint, locate, weights_of

LORA = ("--gin_file", "scale/lora.gin")
PROMPT = "12 + 7 = "


@pytest.fixture(scope="module")
def adapted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    assert finish(command(cache, folder / "run", *LORA), folder / "out") == 0, (folder / "out").read_text()
    return folder / "run"


def exported(source: Path, out: Path, *flags: str) -> Path:
    assert export.main([str(source), str(out), *flags]) == 0
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


@pytest.mark.parametrize("what", ["", "checkpoints/step_6"])
def test_the_last_checkpoint_is_the_model_of_the_run(whole: Path, tmp_path: Path, what: str) -> None:
    out = exported(whole / what, tmp_path / "out")
    assert {p.name for p in out.iterdir()} == {p.name for p in (whole / "model").iterdir()}
    assert same(weights(out), weights(whole / "model"))
    assert torch.equal(says(out), says(whole / "model"))


def test_an_earlier_checkpoint_is_another_model(whole: Path, tmp_path: Path) -> None:
    out = exported(whole / "checkpoints" / "step_4", tmp_path / "out")
    found = store.read_tensors(whole / "checkpoints" / "step_4", "weights.")
    assert same(weights(out), {name: found[name] for name in weights(out)})
    assert not same(weights(out), weights(whole / "model"))


def save_again(world: World, path: Path, root: Path) -> None:
    """The same checkpoint as this many ranks would have written it, in rows."""
    line = init_device_mesh("cpu", (world.size,))
    tensors = {
        name: distribute_tensor(x, line, [Shard(0)]) if x.ndim else x
        for name, x in store.read_tensors(path, "").items()
    }
    with AsyncSaver(root, world) as saver:
        saver.save(6, tensors=tensors, blobs=store.blobs(path), meta=store.meta(path))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("run", ["whole", "adapted"])
def test_how_many_ranks_wrote_it_makes_no_difference(run: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    original = request.getfixturevalue(run)
    copy = Path(shutil.copytree(original, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints")
    saved = original / "checkpoints" / "step_6"
    crew(2).run(save_again, saved, copy / "checkpoints")
    assert len(list((copy / "checkpoints" / "step_6").glob("*.distcp"))) == 2
    assert same(weights(exported(copy, tmp_path / "ours")), weights(exported(original, tmp_path / "theirs")))


def test_adapters_are_merged_into_the_model_that_the_run_began_with(adapted: Path, tmp_path: Path) -> None:
    out = exported(adapted, tmp_path / "out")
    assert same(weights(out), weights(adapted / "model"))
    earlier = exported(adapted / "checkpoints" / "step_4", tmp_path / "earlier")
    assert not same(weights(earlier), weights(out))


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("run", ["whole", "adapted"])
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
    named = find_run_checkpoint(str(adapted)).source.folder()
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
        ("model", [], "expected a run folder or a checkpoint"),
        ("checkpoints/step_5", [], "is broken"),
        ("", ["--adapter"], "expected a checkpoint of a run with LoRA"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    whole: Path, tmp_path: Path, source: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(whole / source), str(tmp_path / "out"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(whole), str(tmp_path)]) == 2
    assert "which exists" in capsys.readouterr().err
