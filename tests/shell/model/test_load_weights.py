"""A folder filled into an empty model is what from_pretrained makes of it, whole or divided among ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import filling_rank
import pytest
import torch
from crew import crew
from fakes import VOCABULARY
from families import FAMILIES, PUBLISHED, family, published
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_fn.shell.model import hf
from grpo_fn.shell.model.hf import entries, folder_of, load_model, load_shards, meta_causal_lm

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's folder, in one file or in shards of at most so many bytes."""
    made: dict[tuple, Path] = {}

    def folder(name: str, shard: str = "1GB") -> Path:
        if (name, shard) not in made:
            made[name, shard] = tmp_path_factory.mktemp("models") / name
            if name in TOWERS:
                model = with_tower(name)
            else:
                model = family(name) if name in FAMILIES else published(name, VOCABULARY)
            model.save_pretrained(made[name, shard], max_shard_size=shard)
        return made[name, shard]

    return folder


VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
TOWERS: dict[str, dict[str, object]] = {  # folders with a vision tower
    "qwen3_5": {  # of which the language model is loaded alone, under other names
        "vision_config": {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    },
    "gemma3": {  # with which it is loaded
        "vision_config": {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16},
        "mm_tokens_per_image": 16,
        "image_token_index": 250,
    },
}


def with_tower(name: str) -> nn.Module:
    text = published(f"{name}_text", VOCABULARY).config.to_dict()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, text_config=text, **TOWERS[name])
    return AutoModelForImageTextToText.from_config(config).float().eval()


def filled(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = meta_causal_lm(AutoConfig.from_pretrained(folder), attention="eager", dtype=dtype)
    load_shards(model, folder, device=CPU)
    return model


def pretrained(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def assert_equal_models(got: nn.Module, expected: nn.Module) -> None:
    assert tensors(got).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert tensors(got)[name].dtype == tensor.dtype, name
        assert tensors(got)[name].requires_grad == tensor.requires_grad, name
        torch.testing.assert_close(tensors(got)[name], tensor, rtol=0, atol=0, msg=name)
    assert got.training == expected.training
    assert torch.equal(logits(got), logits(expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_filled_model_is_the_pretrained_one_bit_for_bit(name: str, folders: Callable) -> None:
    folder = folders(name, "4KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    dtype = torch.bfloat16 if name == "mistral" else torch.float32
    model = filled(folder, dtype)
    assert_equal_models(model, pretrained(folder, dtype))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.get_text_config().tie_word_embeddings


# What is converted: experts that stand one by one, under two names; a bias, and routers, in float32 whatever the rest;
# other names; a buffer that one module sets in others; a folder whose language model alone is loaded.
QUICK = ("mixtral", "qwen3_moe", "deepseek_v3", "dots1", "nemotron_h", "falcon_h1", "qwen3_5", "gemma3")


@pytest.mark.slow_after(len(QUICK))
@pytest.mark.parametrize("name", [*QUICK, *(name for name in PUBLISHED if name not in QUICK)])
def test_every_published_familys_folder_is_read_as_from_pretrained_reads_it(name: str, folders: Callable) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        got, expected = filled(folders(name), dtype), pretrained(folders(name), dtype)
        assert type(got) is type(expected)
        assert tensors(got).keys() == tensors(expected).keys()
        for key, tensor in tensors(expected).items():
            assert tensors(got)[key].dtype == tensor.dtype, key
            assert torch.equal(tensors(got)[key], tensor), key
        assert not got.training


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_model_holds_nothing_but_right_buffers(name: str, folders: Callable) -> None:
    folder = folders(name)
    model = meta_causal_lm(AutoConfig.from_pretrained(folder), attention="eager", dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    expected = dict(pretrained(folder).named_buffers())
    assert expected
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the folder with its tensors changed."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_tied_head_may_stand_in_the_file_alone_or_twice(folders: Callable, tmp_path: Path) -> None:
    def twice(held: dict[str, Tensor]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    def alone(held: dict[str, Tensor]) -> None:
        held["lm_head.weight"] = held.pop("model.embed_tokens.weight")

    expected = pretrained(folders("qwen2_tied"))
    for change in (twice, alone):
        assert_equal_models(filled(rewritten(folders("qwen2_tied"), tmp_path / change.__name__, change)), expected)


def test_tied_weights_that_differ_are_an_error(folders: Callable, tmp_path: Path) -> None:
    def differ(held: dict[str, Tensor]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"] + 1

    bad = rewritten(folders("qwen2_tied"), tmp_path / "bad", differ)
    with pytest.raises(ValueError, match=r"got (\S+) and (\S+) with different values in .*, expected them tied"):
        filled(bad)


def test_frequencies_that_old_files_kept_are_left_alone(folders: Callable, tmp_path: Path) -> None:
    def old(held: dict[str, Tensor]) -> None:
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 9.0)

    folder = rewritten(folders("llama_scaled"), tmp_path / "old", old)
    assert_equal_models(filled(folder), pretrained(folders("llama_scaled")))


def test_persistent_buffers_are_read(folders: Callable, tmp_path: Path) -> None:
    def add(held: dict[str, Tensor]) -> None:
        held["model.norm.seen"] = torch.tensor(7)

    folder = rewritten(folders("qwen3_untied"), tmp_path / "more", add)
    model = meta_causal_lm(AutoConfig.from_pretrained(folder), attention="eager", dtype=torch.float32)
    model.model.norm.register_buffer("seen", torch.tensor(0))
    load_shards(model, folder, device=CPU)
    assert model.model.norm.seen == 7
    assert torch.equal(logits(model), logits(pretrained(folders("qwen3_untied"))))


def test_parameters_that_have_storage_keep_it(folders: Callable) -> None:
    folder = folders("qwen2_tied")
    model = pretrained(folder)
    before = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in before.values():
            parameter.zero_()
    load_shards(model, folder, device=CPU)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert_equal_models(model, pretrained(folder))


# -- what is wrong with a folder


def only(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [path.unlink() for path in folder.iterdir() if not path.match(pattern)]


def as_bin(folder: Path) -> None:
    only("config.json")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def truncate(keep: float) -> Callable[[Path], object]:
    def cut(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])

    return cut


def replace_with(text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(text)


def change(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        held = load_file(file)
        edit(held)
        save_file(held, file, {"format": "pt"})

    return rewrite


NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (only("config.json"), r"got \S+bad, expected model\.safetensors or model\.safetensors\.index\.json in it$"),
        (as_bin, r"got \S+bad, expected model\.safetensors .*; convert pytorch_model\.bin to safetensors"),
        (truncate(0.5), r"got \S+model\.safetensors, expected a whole safetensors file: .*file not fully covered"),
        (truncate(0.0), r"got \S+model\.safetensors, expected a whole safetensors file: .*header too small"),
        (
            replace_with(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 988097824\n"),
            r"got \S+model\.safetensors, a pointer of Git LFS, expected the file itself: git lfs pull",
        ),
        (
            replace_with(b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"),
            r"got \S+model\.safetensors, a page of HTML, expected a safetensors file",
        ),
        (
            change(lambda held: held.update(odd=held[NORM].clone())),
            r"got weights with odd in \S+bad, expected those of Qwen3ForCausalLM alone",
        ),
        (
            change(lambda held: held.update({f"{i}": held.pop(NORM) if i == 0 else torch.ones(1) for i in range(5)})),
            r"got weights without model\.norm\.weight and with \d, \d, \d and 2 more in",
        ),
        (
            change(lambda held: held.update({NORM: torch.ones(15)})),
            r"got model\.norm\.weight of shape \(15,\) in \S+model\.safetensors, expected \(16,\)",
        ),
        (
            change(lambda held: held.update({NORM: torch.ones(16, dtype=torch.int8)})),
            r"got model\.norm\.weight as I8 in \S+model\.safetensors, expected one of F64, F32, F16, BF16",
        ),
    ],
)
def test_a_bad_folder_says_what_was_got_and_expected_before_anything_is_allocated(
    folders: Callable, tmp_path: Path, spoil: Callable, message: str
) -> None:
    bad = rewritten(folders("qwen3_untied"), tmp_path / "bad", lambda held: None)
    model = meta_causal_lm(AutoConfig.from_pretrained(bad), attention="eager", dtype=torch.float32)
    spoil(bad)
    with pytest.raises(ValueError, match=message):
        load_shards(model, bad, device=CPU)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match=message):  # one rank and an evaluation read no other way
        load_model(str(bad), dtype=torch.float32, device=CPU, attention="eager")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda held: held.pop("model.layers.1.mlp.experts.2.down_proj.weight"),
            r"got model\.layers\.1\.mlp\.experts\.down_proj of shape \(3, 64, 32\) in \S+, expected \(4, 64, 32\)",
        ),
        (
            lambda held: held.pop(EXPERT),
            r"got model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight, \S+ \S+ and 4 more in \S+, which do not make ",
        ),
        (
            lambda held: held.update({"model.layers.1.mlp.experts.2.bias": torch.ones(1)}),
            r"got weights with model\.layers\.1\.mlp\.experts\.2\.bias in \S+bad, expected those of Qwen3Moe",
        ),
        (
            lambda held: held.update(
                {"model.layers.1.mlp.experts.2.up_proj.weight": torch.ones(32, 64).to(torch.int8)}
            ),
            r"got model\.layers\.1\.mlp\.experts\.gate_up_proj as I8 in \S+model\.safetensors, expected one of F64",
        ),
    ],
)
def test_an_expert_that_is_missing_left_over_or_of_another_kind_is_named(
    folders: Callable, tmp_path: Path, edit: Callable, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        filled(rewritten(folders("qwen3_moe"), tmp_path / "bad", edit))


def test_quantised_weights_are_refused(folders: Callable, tmp_path: Path) -> None:
    folder = rewritten(folders("qwen3_untied"), tmp_path / "fp8", lambda held: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"got a model whose weights are quantised \(fp8\), expected weights of float"):
        filled(folder)


def sharded_copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"got \S+index\.json, expected a JSON object with a weight_map"),
        ('{"weight_map": ["a"]}', r"got \S+index\.json, expected a JSON object with a weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"got \S+bad without gone\.safetensors, expected every file"),
    ],
)
def test_a_bad_index_says_what_was_got_and_expected(
    folders: Callable, tmp_path: Path, index: str, message: str
) -> None:
    bad = sharded_copy(folders("mistral", "4KB"), tmp_path / "bad")
    (bad / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        entries(bad)


def test_a_shard_that_is_gone_or_truncated_is_named(folders: Callable, tmp_path: Path) -> None:
    bad = sharded_copy(folders("mistral", "4KB"), tmp_path / "bad")
    truncate(0.7)(bad)
    victim = sorted(bad.glob("*.safetensors"))[0]
    with pytest.raises(ValueError, match=rf"got \S+{victim.name}, expected a whole safetensors file"):
        entries(bad)
    victim.unlink()
    with pytest.raises(ValueError, match=rf"got \S+bad without {victim.name}, expected every file that \S+index.json"):
        entries(bad)


def test_a_folder_is_itself_and_a_name_is_downloaded_without_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_of(str(tmp_path)) == tmp_path
    asked = {}

    def download(name: str, **patterns: list[str]) -> str:
        asked.update(name=name, **patterns)
        return str(tmp_path)

    monkeypatch.setattr(hf, "snapshot_download", download)
    assert folder_of("owner/model") == tmp_path
    from huggingface_hub.utils import filter_repo_objects

    there = [
        *("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "vocab.txt", "chat_template.jinja")
    ]
    other = [*("pytorch_model.bin", "consolidated.safetensors", "original/x.safetensors", "model.gguf", "README.md")]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*there, *other], **patterns)) == there


def test_a_name_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="got model 'owner/--bad--', expected a folder or a hub name, owner/model"):
        folder_of("owner/--bad--")


# -- among ranks

RANKS = 2


def test_every_rank_reads_its_rows_alone_and_together_they_are_the_model(folders: Callable, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    FAMILIES["qwen3_untied"](VOCABULARY + 1).save_pretrained(odd)  # its embedding and head cannot be halved
    models = [folders("gemma2_capped", "4KB"), odd, folders("qwen3_moe", "4KB")]
    for seen_by_rank in crew(RANKS).run(filling_rank.seen_of_all, models):
        for folder, seen in zip(models, seen_by_rank, strict=True):
            expected = pretrained(folder)
            for key, tensor in expected.named_parameters():
                assert torch.equal(seen["full"][f"model.{key}"], tensor), key
            whole = sum(p.numel() for p in expected.parameters())
            assert seen["read"] == seen["held"] <= 0.51 * whole
            assert torch.equal(seen["logits"], logits(expected))
            assert seen["adapters"]["whole"].keys() == seen["adapters"]["gathered"].keys() != set()
            for key, tensor in seen["adapters"]["whole"].items():
                assert torch.equal(seen["adapters"]["gathered"][key], tensor), key
