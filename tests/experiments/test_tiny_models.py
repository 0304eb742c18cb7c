"""A tiny model is its recipe: the same one is made once and alike, and lessons are episodes of training problems."""

import random
import re
from collections import Counter
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from experiments.tiny import environments, models, tasks
from experiments.tiny.models import TinyModel
from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.core.problem import Problem
from grpo_fn.environments import tool_use
from grpo_fn.environments.tools import calculator
from grpo_fn.rewards import math
from grpo_fn.shell.episodes import chat_format
from grpo_fn.shell.model import hf
from grpo_fn.tasks import arithmetic

KEY = prng.key(0, device="cpu")
STEP = re.compile(r"(\d+)([+-])(\d+)=")
WORDS = partial(arithmetic.task, max_value=4, operations=2, test_size=20)
LESSONS = partial(models.word_problem_lessons, task=WORDS, worked_share=0.5)
SIZES = {"vocabulary": 290, "hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24, "positions": 96}
PRODUCTS = tasks.products(max_value=99, test_size=8)
MAZES = tasks.mazes(side=3, test_size=8)


def content_of(text: str) -> arithmetic.Content:
    """What a worked solution works out: the first number and the changes."""
    steps = STEP.findall(text)
    return arithmetic.Content(int(steps[0][0]), tuple((op, int(b)) for _, op, b in steps))


def recipe(cache: Path, **knobs) -> TinyModel:
    return TinyModel(**{**SIZES, "lessons": LESSONS, "steps": 3, "rows": 4, "seed": 0, **knobs}, cache=str(cache))


# -- the folder


def variants(cache: Path) -> list[TinyModel]:
    """The recipe with each of its knobs changed in turn, those of the lessons too."""
    base = recipe(cache)
    names = [field.name for field in fields(TinyModel) if field.name not in ("lessons", "cache")]
    lessons = [
        partial(LESSONS, worked_share=0.75),
        partial(LESSONS, task=partial(WORDS, test_size=21)),
        partial(models.task_lessons, task=WORDS, solution=arithmetic.answer_only),
        partial(models.task_lessons, task=WORDS, solution=arithmetic.worked_solution),
    ]
    return [
        *(replace(base, **{name: getattr(base, name) + (0.05 if "range" in name else 2)}) for name in names),
        *(replace(base, lessons=function) for function in lessons),
    ]


def test_a_folder_is_made_once_for_every_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Path] = []

    def make(recipe: TinyModel, path: Path) -> None:
        made.append(path)
        path.mkdir(parents=True)

    monkeypatch.setattr(models, "make_model", make)
    monkeypatch.setattr(models, "check_cached", lambda path: None)
    recipes = [recipe(tmp_path), *variants(tmp_path)]
    assert len(recipes) == 1 + len(asdict(recipes[0])) - 2 + 4
    folders = [r.folder() for r in recipes]
    assert len(set(folders)) == len(folders)
    assert [r.folder() for r in recipes] == folders
    assert [str(path) for path in made] == folders
    elsewhere = Path(recipe(tmp_path / "other").folder())
    assert (elsewhere.name, elsewhere.parent) == (Path(folders[0]).name, tmp_path / "other")


def contents_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_cached_folder_that_is_not_whole_is_named(tmp_path: Path, name: str):
    folder = Path(recipe(tmp_path).folder())
    assert recipe(tmp_path).folder() == str(folder)
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"got the model {folder}, .* is broken: .*delete the folder"):
        recipe(tmp_path).folder()


def test_a_cache_that_cannot_be_written_is_refused_before_a_model_is_made(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(models, "make_model", lambda *_: pytest.fail("it was made"))
    with pytest.raises(ValueError, match=r"TinyModel.cache: got .*file/models .*expected a folder to write models to"):
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


def test_a_vocabulary_the_texts_cannot_fill_is_refused():
    with pytest.raises(ValueError, match=r"got \d+ tokens from the texts, expected 400: lower the vocabulary"):
        models.train_tokenizer(["aa"], vocabulary=400)


# -- lessons


def test_no_held_out_content_is_in_the_tokenizers_texts_or_the_warm_start():
    lessons = models.word_problem_lessons(0, task=WORDS, worked_share=1.0)  # so that every text holds its equation
    texts = [*lessons.texts, *(completion for _, (completion, _) in islice(lessons.rows, 3000))]
    held_out, rest = arithmetic.split_contents(max_value=4, operations=2, test_size=20)
    assert len(texts) == 7000
    assert set(map(content_of, texts)) == set(rest)  # all of the training side
    assert not set(rest) & set(held_out)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_share_of_the_word_problems_is_worked_out(share: float):
    rows = [*islice(models.word_problem_lessons(1, task=WORDS, worked_share=share).rows, 500)]
    assert sum("=" in completion for _, (completion, _) in rows) / 500 == pytest.approx(share, abs=0.07)
    assert all((asked, taught) == (False, True) for (_, asked), (_, taught) in rows)


def test_the_share_of_answers_is_that_of_the_knob_and_the_uid_decides():
    problems = [Problem(uid, "What is 3 + 4?", "7", {}) for uid in range(1000)]
    boxes = [models.answer_or_copied_number(problem, answered_share=0.4) for problem in problems]
    assert {*boxes} == {"\\boxed{7}", "\\boxed{4}"}
    assert 350 < boxes.count("\\boxed{7}") < 450
    assert boxes[::-1] == [models.answer_or_copied_number(problem, answered_share=0.4) for problem in problems[::-1]]
    assert {models.answer_or_copied_number(problem, answered_share=0.0) for problem in problems} == {"\\boxed{4}"}


def test_a_question_without_a_number_has_none_to_copy():
    with pytest.raises(ValueError, match=r"problem 5: got 'Why\?', expected a question that holds a number"):
        models.answer_or_copied_number(Problem(5, "Why?", "7", {}), answered_share=0.0)


def row_of_an_episode(chat, environment, problem, row):
    """(ids, places that are learned, last reward and whether it was the end) of the episode that a row plays."""
    tokenizer = chat.tokenizer
    state, opening = environment.start(problem, 0)
    ids, learned, reward, done = [*chat.open(opening)], [], None, False
    turns = [text for text, taught in row if taught]
    for number, text in enumerate(turns, 1):
        turn = [*tokenizer(text)["input_ids"], chat.end]
        learned += range(len(ids), len(ids) + len(turn))
        ids += turn
        state, messages, reward, done = environment.step(state, chat.parse(turn), 0)
        ids += chat.extend(messages) if number < len(turns) else []
    return ids, learned, reward, done


def check_layout(tokenizer, read_calls, environment, problem, row):
    """The ids and the learned places of a row are those of its episode; returns the reward and whether it ended."""
    chat = chat_format.text(tokenizer, read_calls=read_calls)
    ids, learned, *end = row_of_an_episode(chat, environment, problem, row)
    rollout = models.tokenized_rows([row], tokenizer, torch.device("cpu"))
    assert rollout.tokens[0].tolist() == ids
    assert rollout.mask[0].nonzero().flatten().tolist() == learned
    return tuple(end)


@pytest.mark.parametrize("instructions", ["", "A tool: calculator(expression)."])
def test_a_call_of_the_calculator_is_the_row_of_an_episode(instructions):
    """Calls are read back, the environment answers them as the demonstration says, and the ids are the same."""
    lessons = models.calculator_lessons(0, task=lambda: PRODUCTS, tool_share=1.0, instructions="")
    tokenizer = models.train_tokenizer([*lessons.texts], vocabulary=276)
    play = tool_use.environment(
        tools=[calculator],
        grade=math.correct,
        instructions=instructions,
        max_turns=3,
        pure=True,
    )
    read = partial(chat_format.tags, argument="expression")
    for index in range(20):
        problem = PRODUCTS.train(KEY, index)
        row = models.calculator_row(problem, True, instructions=instructions)
        assert check_layout(tokenizer, read, play, problem, row) == (1.0, True)
    assert models.calculator_row(problem, False, instructions="") == [
        (problem.prompt, False),
        (rf"\boxed{{{problem.answer}}}", True),
    ]


def test_a_share_of_the_products_calls_the_calculator_and_none_is_held_out():
    lessons = models.calculator_lessons(0, task=lambda: PRODUCTS, tool_share=0.3)
    rows = [*islice(lessons.rows, 1000)]
    assert 0.25 < sum(len(row) == 4 for row in rows) / 1000 < 0.35
    assert not {problem.prompt for problem in PRODUCTS.test} & {row[0][0] for row in rows}


def test_a_walk_is_the_row_of_an_episode():
    """The environment answers each direction as the walk says, no move is into a wall, and the ids are the same."""
    lessons = models.maze_lessons(0, task=lambda: MAZES, moves=6, seeking_share=0.5)
    tokenizer = models.train_tokenizer([*lessons.texts], vocabulary=320)
    lengths = Counter()
    for index in range(20):
        problem = MAZES.train(KEY, index)
        choose = partial(models.seek_exit, chance=random.Random(index)) if index % 2 else models.take_first
        row = models.walk(problem, choose, moves=6)
        assert not any("wall" in text for text, _ in row)
        moves = sum(taught for _, taught in row)
        reward, done = check_layout(tokenizer, chat_format.no_calls, environments.maze(), problem, row)
        assert done == (reward == 1.0)
        assert done or moves == 6
        lengths[moves] += 1
    assert len(lengths) > 1  # some have reached the exit


def reaches_exit(problem: Problem, choose: models.ChooseWay) -> bool:
    """Whether the last move of a walk is onto the exit."""
    state = environments.start(problem, 0).state
    for text in (text for text, taught in models.walk(problem, choose, moves=12) if taught):
        state, _, _, done = environments.step(state, Message("assistant", text), 0)
    return done


def test_only_one_kind_of_walk_finds_the_exit():
    problems = [MAZES.train(KEY, n) for n in range(200)]
    chance = random.Random(0)
    assert sum(reaches_exit(problem, partial(models.seek_exit, chance=chance)) for problem in problems) / 200 > 0.75
    assert sum(reaches_exit(problem, models.take_first) for problem in problems) / 200 < 0.25
