"""tools/make_tiny_model.py makes ordinary folders: what AutoTokenizer opens in a fresh process spells any text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_tiny_model
import pytest
from e2e.running import TESTS

FRESH = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

def seen(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": text}]
    spell = tokenizer.apply_chat_template
    return {
        "ids": len(ids), "same": tokenizer.decode(ids) == text, "eos": tokenizer.eos_token,
        "chat": spell(turn, add_generation_prompt=True, tokenize=False) if tokenizer.chat_template else "",
        "ends": model.generation_config.eos_token_id == tokenizer.eos_token_id,
        "head": model.config.hidden_size // model.config.num_attention_heads,
        "positions": model.config.max_position_embeddings,
    }

print(json.dumps([seen(folder, sys.argv[1]) for folder in sys.argv[2:]]))
"""
TEXT = "Tom’s  12 + $3\n\té 日本 <b>\\boxed{15}"


def python(*args: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], env=env, cwd=TESTS.parent, capture_output=True, text=True)


def tool(*args: str) -> subprocess.CompletedProcess:
    return python("tools/make_tiny_model.py", *args)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """What a fresh process sees of a model without and of one with a chat template."""
    plain, chat = (tmp_path_factory.mktemp("random") / "model" for _ in range(2))
    made = tool("--random", "--out", str(plain))
    assert made.returncode == 0, made.stderr
    assert make_tiny_model.main(["--random", "--out", str(chat), "--chat_template"]) == 0
    fresh = python("-c", FRESH, TEXT, str(plain), str(chat))
    assert fresh.returncode == 0, fresh.stderr
    return dict(zip((False, True), json.loads(fresh.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_random_model_spells_any_text(chat: bool, opened: dict[bool, dict[str, Any]]) -> None:
    found = opened[chat]
    assert found["same"]
    assert found["ids"] == len(TEXT.encode())
    assert found["ends"]
    assert found["head"] == 32
    assert found["positions"] >= 2048
    assert found["eos"] == ("<|im_end|>" if chat else "<|endoftext|>")
    assert found["chat"] == (f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n" if chat else "")


def test_it_refuses_to_write_over_what_is_there(tmp_path: Path) -> None:
    made = tool("--random", "--out", str(tmp_path))
    assert made.returncode == 2
    assert "expected a free name" in made.stderr
