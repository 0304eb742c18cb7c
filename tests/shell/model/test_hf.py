"""Model folders: what is wrong with a bad one is said, and an exported one opens anywhere as what it was."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from fakes import MODELS, VOCABULARY, qwen2_tied, tokenizer

from grpo_fn.core.problem import chat_prompt
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.tiny import CHAT_TEMPLATE
from grpo_fn.shell.world import find_device

TRICKY = [
    *("0123456789", "12 + 34 = 46", "a b  c   d", " lead", "trail ", "\n", "\n\n\nx\n", "\t\r\n", "Tom's 3.5%"),
    *("é", "naïve – “quotes”", "日本語", "🙂👍🏽", "مرحبا", "\\boxed{42}", "<|not special|>", "A" * 40),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    hf.export(qwen2_tied(VOCABULARY), tokenizer(), folder)
    return folder


def opened(folder: Path) -> None:
    """What a run does with its model before it starts."""
    source = hf.Pretrained(str(folder))
    source.config()
    hf.load_tokenizer(source.folder())


def copied(good: Path, to: Path) -> Path:
    to.mkdir()
    for file in good.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def drop(pattern: str) -> Callable[[Path], None]:
    return lambda folder: [file.unlink() for file in list(folder.glob(pattern))]


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def rewrite(name: str, **changes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("config.json"), r"got folder .*bad without config\.json; expected a Hugging Face model; it holds gen"),
        (write("config.json", "{"), "got model .*bad', expected a causal language model's folder or hub name: .*JSON"),
        (write("config.json", '{"model_type": "nothing"}'), "got model .*bad', expected a causal .*nothing"),
        (drop("*.safetensors"), r"got .*bad, expected model\.safetensors or model\.safetensors\.index\.json in it"),
        (drop("tokenizer*"), r"got no tokenizer in .*bad; expected tokenizer\.json or its like"),
        (write("tokenizer.json", "{"), r"got no usable tokenizer in .*bad; expected tokenizer\.json or its like: "),
        (
            rewrite("tokenizer_config.json", eos_token=None),
            "got a tokenizer without an EOS token in .*bad; expected one",
        ),
        (
            rewrite("tokenizer_config.json", eos_token="<|new|>"),
            r"got EOS '<\|new\|>' in .*bad, which is not in the vocabulary: its id 290 was added; expected .* 290 ids",
        ),
    ],
)
def test_a_bad_folder_says_what_was_got_and_expected(good: Path, tmp_path: Path, spoil: Callable, message: str):
    bad = copied(good, tmp_path / "bad")
    opened(bad)
    spoil(bad)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        opened(bad)


@pytest.mark.parametrize("name", ["./nor/this", "nowhere", "a/b/c"])
def test_a_missing_folder_is_named(name: str):
    with pytest.raises(
        ValueError, match=f"got model '{name}', which does not exist; expected a Hugging Face model folder"
    ):
        hf.Pretrained(name).config()


@pytest.mark.parametrize("name", list(MODELS))
def test_the_config_gives_the_size_without_the_weights(name: str, tmp_path: Path):
    model = MODELS[name](VOCABULARY)
    hf.export(model, tokenizer(), tmp_path / "m")
    empty = hf.empty_model(hf.Pretrained(str(tmp_path / "m")).config())
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert hf.parameter_count(empty) == sum({id(p): p.numel() for p in model.parameters()}.values())


# -- export

FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = [tokenizer(text)["input_ids"] for text in texts]
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 2, 3]])).logits
report = {"ids": ids, "texts": [tokenizer.decode(row) for row in ids], "eos": tokenizer.eos_token_id}
print(json.dumps({**report, "logits": logits.flatten().tolist(), "words": len(tokenizer)}))
"""


@pytest.mark.slow
def test_an_exported_folder_opens_in_a_fresh_process_as_what_it_was(good: Path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", FRESH, str(good), json.dumps(TRICKY)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["texts"] == TRICKY
    assert seen["ids"] == [tokenizer()(text)["input_ids"] for text in TRICKY]
    assert all(seen["ids"])
    assert (seen["eos"], seen["words"]) == (VOCABULARY - 1, VOCABULARY)
    with torch.no_grad():
        logits = qwen2_tied(VOCABULARY)(torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(torch.tensor(seen["logits"]), logits.flatten(), rtol=0, atol=1e-5)


def test_weights_come_back_bit_for_bit_and_ready_to_score(good: Path):
    model = hf.load_model(str(good), dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    expected = qwen2_tied(VOCABULARY)
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_an_export_replaces_the_folder_before_it(good: Path, tmp_path: Path):
    folder = copied(good, tmp_path / "model")
    (folder / "stale.txt").touch()
    hf.export(qwen2_tied(VOCABULARY), tokenizer(), folder)
    opened(folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in good.iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("before", [True, False])
def test_an_export_that_fails_leaves_what_was_there(good: Path, tmp_path: Path, before: bool):
    folder = tmp_path / "model"
    if before:
        copied(good, folder)

    def fill_up(to: Path) -> None:
        assert (to / "model.safetensors").exists()
        raise OSError("no space left on device")

    broken = deepcopy(tokenizer())
    broken.save_pretrained = fill_up
    with pytest.raises(OSError, match="no space left"):
        hf.export(qwen2_tied(VOCABULARY), broken, folder)
    assert folder.exists() is before
    if before:
        opened(folder)
        assert all((folder / p.name).read_bytes() == p.read_bytes() for p in good.iterdir())


# -- prompts


def test_with_a_chat_template_the_prompt_is_one_user_turn(tmp_path: Path):
    chatty = deepcopy(tokenizer())
    chatty.chat_template = CHAT_TEMPLATE
    hf.export(qwen2_tied(VOCABULARY), chatty, tmp_path / "chat")
    ids = hf.encode_prompt(hf.load_tokenizer(str(tmp_path / "chat")), "Tom has\n12")
    expected = "<|im_start|>user\nTom has\n12<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer()(expected)["input_ids"]


def test_a_system_turn_comes_first_and_needs_a_template():
    chatty = deepcopy(tokenizer())
    with pytest.raises(ValueError, match="got system and user messages for a tokenizer without a chat template"):
        hf.with_system(chatty, "Tom", system="Be brief.")
    chatty.chat_template = CHAT_TEMPLATE
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTom<|im_end|>\n<|im_start|>assistant\n"
    assert hf.with_system(chatty, "Tom", system="Be brief.") == tokenizer()(expected)["input_ids"]
    assert hf.bare_prompt(chatty, "Tom") == hf.encode_prompt(tokenizer(), "Tom") == tokenizer()("Tom")["input_ids"]


def test_the_messages_of_a_conversation_are_the_turns_of_the_chat_template():
    chatty, messages = (
        deepcopy(tokenizer()),
        [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Tom"}],
    )
    prompt = chat_prompt(messages, str)
    with pytest.raises(ValueError, match="got system and user messages for a tokenizer without a chat template"):
        hf.encode_prompt(chatty, prompt)
    chatty.chat_template = CHAT_TEMPLATE
    expected = "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nTom<|im_end|>\n<|im_start|>assistant\n"
    assert hf.encode_prompt(chatty, prompt) == tokenizer()(expected)["input_ids"]
    assert hf.encode_prompt(chatty, pickle.loads(pickle.dumps(prompt))) == tokenizer()(expected)["input_ids"]
    with pytest.raises(ValueError, match="got messages that begin with a system message"):
        hf.with_system(chatty, prompt, system="Be brief.")
    with pytest.raises(ValueError, match=r"got chat messages for hf\.bare_prompt"):
        hf.bare_prompt(chatty, prompt)
    more = chat_prompt([*messages[1:], {"role": "assistant", "content": "has 12"}, *messages[1:]], str)
    assert hf.with_system(chatty, more, system="Brief.")[: len(ids := hf.encode_prompt(chatty, prompt)) - 4] == ids[:-4]


# -- devices and dtypes


def test_devices_and_dtypes_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto", 0) == find_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(ValueError, match="got device 'cuda:0', expected one that exists"):
        find_device("cuda:0", 0)
    assert hf.find_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match=r"got dtype 'int8', expected one of \['bfloat16', 'float16', 'float32'\]"):
        hf.find_dtype("int8")


# -- a GGUF file

PARTS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
PARTS |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
PARTS |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def write_gguf(file: Path) -> torch.nn.Module:
    """A Qwen2 with its tokenizer as llama.cpp writes it, in float32."""
    gguf = pytest.importorskip("gguf", reason="NOT TESTED without the package gguf: GGUF files")
    model, bpe = qwen2_tied(VOCABULARY), json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    sizes, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_rope_freq_base(sizes.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokenizer().convert_ids_to_tokens(range(VOCABULARY)))
    writer.add_token_types([3 if i in tokenizer().all_special_ids else 1 for i in range(VOCABULARY)])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(tokenizer().eos_token_id)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for block in range(sizes.num_hidden_layers):
        for part, name in PARTS.items():
            for kind in ("weight", "bias"):
                if (weight := weights.get(f"model.layers.{block}.{name}.{kind}")) is not None:
                    writer.add_tensor(f"blk.{block}.{part}.{kind}", weight.numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return model


def test_a_gguf_file_becomes_a_folder_of_the_same_weights_and_tokens_once(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    source = hf.GgufFile(str(tmp_path / "model.gguf"), cache=str(tmp_path / "cache"))
    named, folder = source.config(), Path(source.folder())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (source.folder(), source.config().to_dict()) == (str(folder), hf.Pretrained(str(folder)).config().to_dict())
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert named.name_or_path == str(folder)
    model = hf.load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), attention="eager")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    opened = hf.load_tokenizer(str(folder))
    assert [opened(text)["input_ids"] for text in TRICKY] == [tokenizer()(text)["input_ids"] for text in TRICKY]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"got model \S+model\.gguf', expected a whole GGUF file of a model that"):
        source.config()


def test_a_gguf_file_that_is_not_there_and_one_without_its_package_are_named(tmp_path: Path, monkeypatch) -> None:
    assert isinstance(hf.named_model("owner/model"), hf.Pretrained)
    with pytest.raises(ValueError, match=r"got model \S+none\.gguf' \(No such file or directory\), expected a GGUF"):
        hf.named_model(str(tmp_path / "none.gguf")).config()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(hf, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"model\.gguf' without the package gguf: pip install 'grpo-fn\[gguf\]'"):
        hf.named_model(str(tmp_path / "model.gguf")).config()
