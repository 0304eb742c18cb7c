"""`grpo_fn tiny-model` makes ordinary folders: what AutoTokenizer opens spells any text."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fn import tiny_model

TEXT = "Tom’s  12 + $3\n\té 日本 <b>\\boxed{15}"


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_random_model_spells_any_text(chat: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert tiny_model.main(["--out", str(folder), *["--chat_template"] * chat]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert (tokenizer.decode(ids), len(ids)) == (TEXT, len(TEXT.encode()))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token == ("<|im_end|>" if chat else "<|endoftext|>")
    assert model.config.hidden_size // model.config.num_attention_heads == 32  # the smallest that vLLM takes
    assert model.config.max_position_embeddings >= 2048
    if chat:
        turn = [{"role": "user", "content": TEXT}]
        written = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert written == f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def test_an_existing_folder_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_model.main(["--out", str(tmp_path)]) == 2
    assert "expected a free name" in capsys.readouterr().err
