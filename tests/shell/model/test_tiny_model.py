"""The embedded model is its recipe: the same one is made once and alike, and never from held-out problems."""

import re
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from grpo_fn.shell import warm_start
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.model.tiny_model import Recipe, Shape, WarmStart
from grpo_fn.tasks import arithmetic

NUMBERS = ("max_value", "operations", "test_size", "seed")
SHAPE = Shape(vocabulary=290, hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24, positions=96)
STEP = re.compile(r"(\d+)([+-])(\d+)=")


def content_of(text: str) -> arithmetic.Content:
    """What a worked solution works out: the first number and the changes."""
    steps = STEP.findall(text)
    return arithmetic.Content(int(steps[0][0]), tuple((op, int(b)) for _, op, b in steps))


def recipe(cache: Path, **knobs) -> Recipe:
    warm_start = WarmStart(steps=3, rows=4, lr=1e-3, worked_share=0.5)
    chosen = {"max_value": 4, "operations": 2, "test_size": 20, "shape": SHAPE, "warm_start": warm_start, "seed": 0}
    return Recipe(**{**chosen, **knobs}, cache=str(cache))


def other_values(knobs: dict) -> list[dict]:
    """The same knobs with one of them changed, for each of them."""
    return [{**knobs, name: value + (0.25 if isinstance(value, float) else 2)} for name, value in knobs.items()]


def variants(cache: Path) -> list[Recipe]:
    """The recipe with each of its knobs changed in turn."""
    base = recipe(cache)
    return [
        *(replace(base, **{name: getattr(base, name) + 1}) for name in NUMBERS),
        *(replace(base, shape=Shape(**knobs)) for knobs in other_values(asdict(base.shape))),
        *(replace(base, warm_start=WarmStart(**knobs)) for knobs in other_values(asdict(base.warm_start))),
    ]


def test_a_folder_is_made_once_for_every_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Path] = []

    def make(recipe: Recipe, path: Path) -> None:
        made.append(path)
        path.mkdir(parents=True)

    monkeypatch.setattr(tiny_model, "make_tiny_model", make)
    monkeypatch.setattr(tiny_model, "check_cached", lambda path: None)
    recipes = [recipe(tmp_path), *variants(tmp_path)]
    assert len(recipes) == 1 + len(NUMBERS) + len(asdict(SHAPE)) + 4
    folders = [r.folder() for r in recipes]
    assert len(set(folders)) == len(folders)
    assert [r.folder() for r in recipes] == folders
    assert [str(path) for path in made] == folders
    elsewhere = recipe(tmp_path / "other").folder()
    assert Path(elsewhere).name == Path(folders[0]).name
    assert Path(elsewhere).parent == tmp_path / "other"


def contents_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_cached_folder_that_is_not_whole_is_named(tmp_path: Path, name: str):
    folder = Path(recipe(tmp_path).folder())
    assert recipe(tmp_path).folder() == str(folder)
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"got the model {folder}, .* is broken: .*delete the folder"):
        recipe(tmp_path).folder()


def test_a_cache_that_cannot_be_written_is_refused_before_a_model_is_made(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tiny_model, "make_tiny_model", lambda *_: pytest.fail("it was made"))
    with pytest.raises(ValueError, match=r"Recipe.cache: got .*file/models .*wanted a folder to write models to"):
        recipe(tmp_path / "file" / "models").folder()


def test_the_same_recipe_makes_the_same_bytes_wherever_the_global_generator_stands(tmp_path: Path):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = Path(recipe(tmp_path / "a").folder())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = Path(recipe(tmp_path / "b").folder())
    assert contents_of(first) == contents_of(second)
    other = Path(recipe(tmp_path / "c", seed=1).folder())
    assert contents_of(other)["model.safetensors"] != contents_of(first)["model.safetensors"]


def test_the_folder_is_an_ordinary_one_and_its_eos_the_last_entry(tmp_path: Path):
    made = recipe(tmp_path)
    source = hf.Pretrained(made.folder())
    tokenizer = hf.load_tokenizer(source.folder())
    model = hf.load_model(source.folder(), dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    assert source.config().to_dict()["hidden_size"] == made.config().hidden_size == 16
    assert hf.parameter_count(model) == hf.parameter_count(hf.empty_model(made.config()))
    assert tokenizer.eos_token_id == made.config().eos_token_id == len(tokenizer) - 1 == 289
    assert hf.stop_ids(tokenizer, model) == [289]


def test_no_held_out_content_is_in_the_tokenizers_texts_or_the_warm_start(tmp_path: Path, monkeypatch):
    texts: list[str] = []
    train_tokenizer = tiny_model.train_tokenizer

    def spy_texts(corpus: list[str], *, vocabulary: int):
        texts.extend(corpus)
        return train_tokenizer(corpus, vocabulary=vocabulary)

    def spy_pairs(model, tokenizer, pairs, plan, *, report) -> None:
        texts.extend(completion for _, (completion, _) in islice(pairs, 3000))

    monkeypatch.setattr(tiny_model, "train_tokenizer", spy_texts)
    monkeypatch.setattr(warm_start, "train_supervised", spy_pairs)
    plan = WarmStart(steps=3, rows=4, lr=1e-3, worked_share=1.0)  # so that every text holds its equation
    recipe(tmp_path, warm_start=plan).folder()
    seen = set(map(content_of, texts))
    held_out, rest = arithmetic.split_contents(max_value=4, operations=2, test_size=20)
    assert len(texts) >= 3000 + 1000
    assert seen == set(rest)  # all of the training side
    assert not seen & set(held_out)


def test_the_warm_start_lowers_the_loss_and_leaves_prompts_alone(tmp_path: Path):
    tokenizer = tiny_model.train_tokenizer(["How many? \\boxed{7}"] * 9, vocabulary=262)
    eos = tokenizer.eos_token_id
    shown = [[("How many?", False), ("7", True)], [("How?", False), ("77", True)]]
    given = warm_start.tokenized_rows(shown, tokenizer, torch.device("cpu"))
    assert given.text == ("How many?7", "How?77")
    for row, (prompt, answer) in enumerate((("How many?", "7"), ("How?", "77"))):
        p, a = (tokenizer(text)["input_ids"] for text in (prompt, answer))
        assert given.tokens[row].tolist()[: len(p + a) + 1] == [*p, *a, eos]
        learned = range(len(p), len(p + a) + 1)
        assert given.mask[row].nonzero().flatten().tolist() == [*learned]
    said: list[str] = []
    model = tiny_model.random_model(replace(SHAPE, vocabulary=262), seed=0, eos=eos)
    plan = WarmStart(steps=100, rows=2, lr=1e-2, worked_share=0.0)
    pairs = iter(shown * 100)
    warm_start.train_supervised(model, tokenizer, pairs, plan, report=said.append)
    assert said == [said[0]]
    assert said[0].startswith("[warm start] step 100/100 loss 0.0")


def test_a_vocabulary_the_texts_cannot_fill_is_refused():
    with pytest.raises(ValueError, match=r"got \d+ tokens from the texts, wanted 400: lower the vocabulary"):
        tiny_model.train_tokenizer(["aa"], vocabulary=400)
