"""A small Qwen2 with its own tokenizer: warm-started on the demonstrations of a task, or random.

The result is an ordinary Hugging Face folder. A warm-started one is kept under a hash of all that it is made of, so a
folder that is there is the one that would be made.
"""

import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as token_models
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, Qwen2TokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

import grpo_fn
from experiments.tiny import environments
from grpo_fn.algo import objective, supervised
from grpo_fn.algo.step import UNMOVED
from grpo_fn.core import prng
from grpo_fn.core.batch import given_batch
from grpo_fn.core.environment import Message
from grpo_fn.core.partials import describe_function
from grpo_fn.core.problem import COMPLETION, Problem
from grpo_fn.core.types import Batch, Pullback, Rollout, Scores
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.demonstrations import Demonstration, given_rows
from grpo_fn.shell.model.logprob_model import dense_scores, predicting_states, scatter_to_rows
from grpo_fn.shell.model.tiny import EOS, Qwen2Sizes, random_model
from grpo_fn.shell.policy import optimizer
from grpo_fn.tasks.arithmetic import answer_only, block_uniforms, worked_solution
from grpo_fn.tasks.task import Task, frozen_key

# Packages whose files are part of a model's name, besides those of this folder: all that a warm start runs is in them.
SOURCES = ("core", "algo", "tasks", "shell/model", "shell/policy")
NAMED_TEXTS = 64  # that are part of a model's name, too: a library that makes a task's problems may change them

Segment = tuple[str, bool]  # text, and whether it is taught or only read
Row = Sequence[Segment]


class Lessons(NamedTuple):
    """What a model is taught, made as it is read; the texts come first."""

    texts: Iterator[str]  # that the tokenizer is trained on
    rows: Iterator[Row]  # endless demonstrations


@dataclass(frozen=True, kw_only=True)
class TinyModel(Qwen2Sizes):
    """The recipe of a warm-started model, which decides its every byte."""

    lessons: Callable[[int], Lessons]  # seed -> what is taught: `word_problem_lessons` and the others below
    steps: int  # updates of the warm start
    rows: int = 64  # demonstrations an update
    seed: int  # of weights and demonstrations
    cache: str = "~/.cache/grpo_fn"  # folder that models are kept in

    def folder(self) -> str:
        """The cached folder, made now when it is not there."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)} | {
            "lessons": describe_function(self.lessons),
            "texts": [*islice(self.lessons(self.seed).texts, NAMED_TEXTS)],
            "sources": [hashlib.sha256(file.read_bytes()).hexdigest() for file in source_files()],
            "versions": [version("torch"), version("transformers")],
        }
        del parts["cache"]
        number = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        path = Path(self.cache).expanduser() / f"tiny-{number}"
        if path.is_dir():
            check_cached(path)
        else:
            check_cache(path.parent)
            make_model(self, path)
        return str(path)


def source_files() -> list[Path]:
    """The files of code that decide a model."""
    package = Path(grpo_fn.__file__).parent
    folders = [Path(__file__).parent, *(package / name for name in SOURCES)]
    return [file for folder in folders for file in sorted(folder.glob("*.py"))]


def check_cached(path: Path) -> None:
    """Raise ValueError for a model made earlier whose files are no longer whole."""
    try:
        hf.entries(path)
        hf.load_tokenizer(str(path))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"got the model {path}, which an earlier run made and which is broken: {error}; expected it whole: delete "
            "the folder, and it is made anew"
        ) from error


def check_cache(cache: Path) -> None:
    """Make the folder that models are kept in. Raises ValueError when it cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ValueError(f"TinyModel.cache: got {cache} ({error}), expected a folder to write models to") from error


def make_model(recipe: TinyModel, path: Path, *, device: str = "cpu", report: Callable[[str], None] = print) -> None:
    """Build, warm-start on the device and write the model."""
    lessons = recipe.lessons(recipe.seed)
    tokenizer = train_tokenizer([*lessons.texts], vocabulary=recipe.vocabulary)
    model = random_model(recipe.config(), seed=recipe.seed).to(device)
    warm_start(model, tokenizer, lessons.rows, steps=recipe.steps, batch_rows=recipe.rows, report=report)
    hf.export(model, tokenizer, path)


def train_tokenizer(texts: list[str], *, vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE in Qwen2's own form (its pre-tokenizer splits digits), `vocabulary` entries, EOS the last.

    Qwen2's form because AutoTokenizer rebuilds a Qwen2 folder's tokenizer from vocabulary and merges alone and would
    drop any other pre-tokenizer. Raises ValueError when the texts do not yield that many entries.
    """
    bpe = Tokenizer(token_models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocab = {**learned["vocab"], EOS: vocabulary - 1}
    if len(vocab) != vocabulary:
        raise ValueError(
            f"got {len(vocab)} tokens from the texts, expected {vocabulary}: lower the vocabulary or give more text"
        )
    return Qwen2TokenizerFast(vocab=vocab, merges=[tuple(m) for m in learned["merges"]])


# -- what models are taught


def word_problem_lessons(seed: int, *, task: Callable[[], Task], worked_share: float) -> Lessons:
    """Right solutions of `arithmetic.task`, a share of which shows the working; the others state the answer alone."""
    problems, key = task(), prng.key(seed, device="cpu")
    texts, shown = prng.fold_in(key, 0), prng.fold_in(key, 1)
    style = frozen_key(prng.fold_in(shown, 1 << 32))  # no block of problems has that number

    def solution(index: int) -> Row:
        problem = problems.train(shown, index)
        write = worked_solution if block_uniforms(style, 6, index)[0] < worked_share else answer_only
        return [(problem.prompt, False), (write(problem), True)]

    corpus = (problems.train(texts, index) for index in range(4000))
    both = (f"{problem.prompt} {worked_solution(problem)} {answer_only(problem)}" for problem in corpus)
    return Lessons(both, map(solution, count()))


def task_lessons(seed: int, *, task: Callable[[], Task], solution: Callable[[Problem], str]) -> Lessons:
    """Completions of any task's training problems, as `solution` writes them."""
    problems, key = task(), prng.fold_in(prng.key(seed, device="cpu"), 1)
    pairs = ((problem.prompt, solution(problem)) for problem in (problems.train(key, index) for index in count()))
    texts = (f"{prompt} {completion}" for prompt, completion in islice(pairs, 2000))
    return Lessons(texts, ([(prompt, False), (completion, True)] for prompt, completion in pairs))


def given_completion(problem: Problem) -> str:
    """The completion that a task of demonstrations gives its problem: `arithmetic.demonstration_task`."""
    return problem.meta[COMPLETION]


_ANSWERED = frozen_key(prng.key(20_261_125, device="cpu"))  # decides which problems are answered


def answer_or_copied_number(problem: Problem, *, answered_share: float) -> str:
    """A box in every case: the answer in a share of the problems, in the others the last number of the question."""
    if block_uniforms(_ANSWERED, 1, problem.uid)[0] < answered_share:
        return answer_only(problem)
    numbers = re.findall(r"\d+", problem.prompt)
    if not numbers:
        raise ValueError(f"problem {problem.uid}: got {problem.prompt!r}, expected a question that holds a number")
    return rf"\boxed{{{numbers[-1]}}}"


def calculator_lessons(seed: int, *, task: Callable[[], Task], tool_share: float, instructions: str = "") -> Lessons:
    """Right answers of `tasks.products`, a share of which calls the calculator; the others state the answer alone.

    `instructions` are the system message of every episode, as it reads there.
    """
    problems, key = task(), prng.key(seed, device="cpu")
    texts, shown = prng.fold_in(key, 0), prng.fold_in(key, 1)
    style = frozen_key(prng.fold_in(shown, 1 << 32))  # no block of problems has that number
    row = partial(calculator_row, instructions=instructions)
    corpus = (row(problems.train(texts, index), call) for index in range(4000) for call in (False, True))
    rows = (row(problems.train(shown, index), block_uniforms(style, 1, index)[0] < tool_share) for index in count())
    return Lessons(("".join(text for text, _ in segments) for segments in corpus), rows)


def calculator_row(problem: Problem, call: bool, *, instructions: str) -> Row:
    r"""An episode as `chat_format.text` lays it out: a call and the observation, if there is one, then `\boxed{}`."""
    turn = (f"<calculator>{problem.meta['expression']}</calculator>", True)
    turns = [turn, (f"\n{problem.answer}\n", False)] if call else []
    opening = f"{instructions}\n{problem.prompt}" if instructions else problem.prompt
    return [(opening, False), *turns, (answer_only(problem), True)]


OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
# (open ways, those of them that lead nearer to the exit, the way back) -> the way that is taken
ChooseWay = Callable[[Sequence[str], Sequence[str], str], str]


def maze_lessons(seed: int, *, task: Callable[[], Task], moves: int, seeking_share: float) -> Lessons:
    """Walks of so many moves through mazes: a share seeks the exit, the others take the first way that is named."""
    problems, key, chance = task(), prng.key(seed, device="cpu"), random.Random(seed)

    def walks(number: int) -> Iterator[Row]:
        stream = prng.fold_in(key, number)
        for index in count():
            choose = partial(seek_exit, chance=chance) if chance.random() < seeking_share else take_first
            yield walk(problems.train(stream, index), choose, moves=moves)

    # zip draws a walk more than it pairs, and all walks share `chance`: with islice a seed would be another model.
    return Lessons(("".join(text for text, _ in row) for row, _ in zip(walks(0), range(500), strict=False)), walks(1))


def take_first(ways: Sequence[str], nearer: Sequence[str], back: str) -> str:
    """The first way that is named: a walk to and fro, unless the exit happens to be on it."""
    return ways[0]


def seek_exit(ways: Sequence[str], nearer: Sequence[str], back: str, *, chance: random.Random) -> str:
    """A way that leads nearer to the exit, by chance if there are two; back only if nothing else is open."""
    ahead = [way for way in ways if way != back] or ways
    return chance.choice([way for way in ahead if way in nearer] or ahead)


def walk(problem: Problem, choose: ChooseWay, *, moves: int) -> Row:
    """A walk through the maze, as `chat_format.text` lays the episode out; it ends at the exit or after the moves."""
    state, messages = environments.start(problem, 0)
    row: list[Segment] = [("\n".join(message.content for message in messages), False)]
    back = ""
    for move in range(moves):
        place = state["maze"], state["row"], state["column"]
        way = choose(environments.open_ways(*place), environments.exit_directions(*place), back)
        back = OPPOSITE[way]
        row.append((way, True))
        state, messages, _, done = environments.step(state, Message("assistant", way), 0)
        if done or move + 1 == moves:
            break
        row += [(f"\n{message.content}\n", False) for message in messages]
    return row


# -- the warm start: updates of the supervised stage, on padded rows


CROSS_ENTROPY = partial(supervised.cross_entropy, token_weight=None, loss_aggregation=objective.token_mean)
ADAMW = partial(optimizer.adamw, lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01)


class PaddedPolicy:
    """A `TrainablePolicy` of a model and an optimizer: one process, rows padded, no clipping, temperature 1."""

    dropout = False

    def __init__(
        self,
        model: nn.Module,
        *,
        optimize: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        schedule: Callable[[int], float],  # update, from 0 -> multiplier of the learning rate
    ) -> None:
        self.model = model
        self.optimizer = optimize(model.parameters())
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = schedule
        self.updates = 0

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """Scores of the batch's tokens, and the map from the cotangent of their log-probs to gradients."""
        logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        scores = dense_scores(*predicting_states(logits, batch.tokens, batch.mask), temperature=1.0)
        logp, entropy = (scatter_to_rows(x, batch.mask) for x in scores)

        def pullback(dscores: Scores) -> None:
            torch.autograd.backward([logp], [dscores.logp])

        return Scores(logp.detach(), entropy.detach()), pullback

    def set_accumulation_steps(self, parts: int) -> None:
        """Nothing waits for the last micro-batch."""

    def split_rows(self, batch: Batch) -> list[Int[Tensor, "B"]]:
        """All rows as one micro-batch."""
        return [torch.arange(len(batch.mask), device=batch.mask.device)]

    def update(self) -> dict[str, float]:
        """One optimizer step at the schedule's rate; clears the gradients."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * self.schedule(self.updates)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return {}


def warm_start(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[Row],
    *,
    steps: int,
    batch_rows: int,
    report: Callable[[str], None] = print,
) -> None:
    """Minimise the cross entropy of what each row teaches, in `steps` updates of the supervised stage.

    AdamW; the rate rises over a twentieth of the steps, then falls along a line to a tenth. Where the model is.
    """
    device = next(model.parameters()).device
    decay = partial(optimizer.linear_decay, warmup=steps // 20, total=steps, final=0.1)
    policy = PaddedPolicy(model, optimize=ADAMW, schedule=decay)
    bar = tqdm(range(steps), "warm start", file=sys.stdout, disable=None, leave=False, dynamic_ncols=True)
    began = time.perf_counter()
    for step in bar:
        batch = given_batch(tokenized_rows([next(rows) for _ in range(batch_rows)], tokenizer, device))
        (learned,) = supervised.learn_given(
            policy, batch, CROSS_ENTROPY, UNMOVED, epochs=1, minibatches=1, own_pass=False
        )
        done = step + 1
        if done % 100 == 0 and done < steps and bar.disable:  # the bar is for a terminal, lines are for the others
            left = (time.perf_counter() - began) / done * (steps - done)
            report(f"[warm start] step {done}/{steps} loss {learned.objective:.3f}, {left:.0f} s left")
    report(f"[warm start] step {steps}/{steps} loss {learned.objective:.3f}")


def tokenized_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Rollout:
    """Rows of a supervised stage, of segments that become tokens by themselves; one that is taught ends with EOS."""
    eos = tokenizer.eos_token_id
    tokens = iter(tokenizer([text for row in rows for text, _ in row])["input_ids"])
    demonstrations = []
    for row in rows:
        segments = [(([*next(tokens), eos] if taught else next(tokens)), taught) for _, taught in row]
        ids = [token for segment, _ in segments for token in segment]
        demonstrations.append(Demonstration(ids, [taught for segment, taught in segments for _ in segment]))
    texts = ["".join(text for text, _ in row) for row in rows]
    return given_rows(demonstrations, texts, pad=eos, device=device)
