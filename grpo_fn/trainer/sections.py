"""The typed sections of a configuration: what gin binds, by what it is about. `step.Algorithm` and `mesh.Parallelism`
are sections too, and stand where they are used.

Each section checks its own numbers when it is made, and raises ValueError. What its functions are to one another is
checked in `validate`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.curricula import Curriculum
from grpo_fn.algo.step import Algorithm
from grpo_fn.algo.supervised import Stage
from grpo_fn.core.environment import Environment
from grpo_fn.core.partials import check_positive, function_and_knobs
from grpo_fn.core.problem import Problem, RewardFn, Scorer
from grpo_fn.core.types import Reward, Sampler
from grpo_fn.shell.episodes.chat_format import ChatFormat, MakeChatFormat
from grpo_fn.shell.episodes.episode_rows import Environments, OnFailure, Tape
from grpo_fn.shell.logging.tracker import Mirror
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.demonstrations import Demonstrate
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.fsdp import FSDPPolicy, LossScale, Optimizer, ReferenceModel, Schedule
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool
from grpo_fn.shell.sampler.interface import SamplerFactory, TokenSampler
from grpo_fn.shell.sampler.probe import Probe
from grpo_fn.shell.vllm.served_teacher import VllmTeacher
from grpo_fn.tasks.privileged import PrivilegedPrompt
from grpo_fn.tasks.task import Task
from grpo_fn.trainer import health
from grpo_fn.trainer.evaluation import AnswerExtractor, GradedAnswer, evaluate, grader_names

# The policy as its own teacher, called once with it and the frozen start model (`trainer.teachers`).
SelfTeacher = Callable[[FSDPPolicy, ReferenceModel | None], ReferenceModel]
TeacherModel = str | hf.ModelSource | SelfTeacher | VllmTeacher


@dataclass(frozen=True, kw_only=True)
class Data:
    """Problems and prompt encoding: the task, its prompts as tokens, and the rule for prompts that are too long."""

    task: Callable[[], Task]  # makes the task: training problems and the held-out set
    encode_prompt: hf.Encode  # (tokenizer, prompt) -> token ids
    overlong_prompts: Callable[..., tuple[Task, int]]  # rule for prompts that leave no space for an answer
    demonstration: Demonstrate  # (tokenizer, problem, *, encode) -> its given tokens, and which of them to learn
    SUPPLIED: ClassVar = {"demonstration": ("encode",)}


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Device, precision and kernels of the model's computation."""

    device: str  # "auto", "cpu", "cuda"
    dtype: str  # of the computation; trainable weights are kept in float32
    attention: str  # "auto", what the model has; "sdpa", "eager" or a kernel by name: docs/running/performance.md
    deterministic: bool  # CUDA kernels that give the same bits again; a CPU's do without it
    logits_chunk_elements: int  # most logits that live at once in the head; fewer where the device is small

    def __post_init__(self) -> None:
        check_positive(logits_chunk_elements=self.logits_chunk_elements)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of the training completions: the engine, its limits and the distribution that it draws from."""

    sampler: SamplerFactory  # makes the sampler with its engine
    max_rows: int  # sequences decoded at once by one engine
    token_sampler: TokenSampler  # (logits, u, *, temperature) -> (token, log-prob)
    temperature: float  # of the sampler and of the trainer's log-probs
    max_new_tokens: int  # most tokens of a completion
    max_total_tokens: int | None  # most tokens of a prompt and its completion together; None: no such limit
    stop: Sequence[str]  # texts that end a completion; the end-of-sequence token always does
    allow_biased: bool  # draws that are not from softmax(logits / temperature)
    max_staleness: int  # batches sampled ahead of the training; 0: none
    probe: Probe | None  # compares the engine's log-probs with the policy's after each weight sync
    SUPPLIED: ClassVar = {"token_sampler": ("temperature",)}

    def __post_init__(self) -> None:
        check_positive(max_new_tokens=self.max_new_tokens, max_rows=self.max_rows)
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ValueError(
                f"sections.Sampling.max_total_tokens: got {self.max_total_tokens}, expected None or at least 2, for a "
                "prompt and its completion"
            )


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Episodes of several turns: the environment, its limits, and the processes that it runs in.

    `Sampling.max_new_tokens` counts the sampled tokens of all turns, `max_total_tokens` all that is in a row.
    """

    environment: Environment  # what answers the policy's messages
    chat_format: MakeChatFormat  # (tokenizer) -> messages as tokens and back
    max_turns: int  # of an episode
    max_turn_tokens: int  # that the policy may sample in a turn
    on_failure: OnFailure  # (failure, whether tools were called) -> the answer that the episode gets
    answer_steps: int | None  # decode steps before an answer is waited for; None: rows continue as answers come
    workers: int  # processes that the environment runs in, on each rank
    deadline: float  # wall clock of a start or step, seconds
    memory_mb: int  # address space of each process, MB

    def __post_init__(self) -> None:
        if not isinstance(self.environment, Environment):
            got = type(self.environment).__name__
            raise ValueError(f"sections.Episodes.environment: got a {got}, expected an Environment (core.environment)")
        check_positive(max_turns=self.max_turns, max_turn_tokens=self.max_turn_tokens)
        if self.answer_steps is not None and self.answer_steps < 0:
            raise ValueError(f"sections.Episodes.answer_steps: got {self.answer_steps}, expected None or at least 0")

    @property
    def name(self) -> str:
        """The function that makes the environment's steps, with its module."""
        fn, _ = function_and_knobs(self.environment.step)
        return f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__name__)}"

    def pool(self) -> EnvironmentPool:
        """The worker processes of the environment. A context manager."""
        return EnvironmentPool(self.environment, workers=self.workers, deadline=self.deadline, memory_mb=self.memory_mb)

    def environments(self, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool) -> Environments:
        """The environments as samplers use them.

        Raises ValueError for a tokenizer in whose chat format turns cannot be appended exactly.
        """
        chat = self.chat_format(tokenizer)
        if not isinstance(chat, ChatFormat):
            raise ValueError(
                f"sections.Episodes.chat_format: got a {type(chat).__name__}, expected a ChatFormat: an object with "
                "end, open, extend, parse and read"
            )
        return Environments(
            name=self.name,
            pure=self.environment.pure,
            caller=pool,
            chat=chat,
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            fails=self.on_failure,
            answer_steps=self.answer_steps,
            tape=Tape(),
        )


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The reward of completions, and the processes that compute it."""

    reward: Callable[..., Reward]  # (problems, rollout, *, score) -> Reward
    pool: Callable[[], RewardPool]  # makes the pool of worker processes
    SUPPLIED: ClassVar = {"reward": ("score",)}


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Models that a credit of `algo.distillation` learns from: one for all problems, or several."""

    models: Mapping[str, TeacherModel]  # by key: folder or hub name, what makes one, the policy itself, vLLM servers
    key: Callable[[Problem], str]  # problem -> which of them
    prompt: PrivilegedPrompt | None  # what they read in the place of the problem's prompt; None: that prompt
    encode_prompt: hf.Encode | None  # (tokenizer, prompt) -> ids, of each teacher's own; None: as the policy's are made
    offload: bool  # weights of loaded ones on the host, moved to the device when needed
    relative_entropy: bool  # entropies are -KL(policy || teacher) over the vocabulary: `entropy_bonus` weighs that

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("sections.Teacher.models: got none, expected at least one")
        beside = [name for name in ("prompt", "encode_prompt") if getattr(self, name) is not None]
        if self.relative_entropy and (beside or len(self.models) > 1 or self.on_servers() or self.of_policy()):
            raise ValueError(
                f"sections.Teacher.relative_entropy: got true with models {[*self.models.values()]} and "
                f"{beside or 'no prompt'}, expected one model beside the policy that reads the policy's own prompt"
            )

    def on_servers(self) -> dict[str, VllmTeacher]:
        """Those on vLLM servers, by key."""
        return {name: model for name, model in self.models.items() if isinstance(model, VllmTeacher)}

    def of_policy(self) -> dict[str, SelfTeacher]:
        """Those that are the policy itself, by key."""
        return {name: model for name, model in self.models.items() if callable(model)}

    def sources(self) -> dict[str, hf.ModelSource]:
        """The sources of the loaded models by key. Raises ValueError for a value that is not a model."""
        not_loaded = self.on_servers() | self.of_policy()
        loaded = {name: model for name, model in self.models.items() if name not in not_loaded}
        return {name: model_source(model, "sections.Teacher.models") for name, model in loaded.items()}


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Given completions that `supervised.demonstrations` learns from beside the sampled ones."""

    task: Callable[[], Task]  # makes the problems, each with a completion; the held-out ones are not used
    rows: int  # a step, dealt out to its minibatches

    def __post_init__(self) -> None:
        check_positive(demonstration_rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """Weight updates: micro-batches, optimizer, learning-rate schedule, loss scale and gradient clipping."""

    micro_tokens: int  # tokens that a device reads in one micro-batch, at most
    min_micro_batches: int  # that an update accumulates, where it has rows enough
    optimizer: Optimizer  # (trainable parameters) -> torch optimizer
    schedule: Schedule  # update -> factor of the learning rate
    loss_scale: LossScale | None  # (scale, good steps, finite) -> (scale, good steps), after each update; None: fixed
    initial_scale: float  # loss scale of the first update; 1: none
    max_grad_norm: float  # gradients of a larger global L2 norm are scaled down to it

    def __post_init__(self) -> None:
        check_positive(micro_tokens=self.micro_tokens, min_micro_batches=self.min_micro_batches)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation on held-out problems: how many of them, the graders, the samples and the engine."""

    every: int  # steps; 0: only before and after the training
    problems: int  # held-out problems, at most
    graders: Sequence[RewardFn]  # the first one decides what is right
    samples: int  # drawn for each problem, besides the greedy answer
    ks: Sequence[int]  # of pass@k and maj@k
    token_sampler: TokenSampler  # of the samples
    extract_answer: AnswerExtractor | None  # completion -> answer, for maj@k and the tables
    by: Sequence[str]  # problem fields to report separately
    async_sampler: SamplerFactory | None  # an engine beside the training; None: that of the training, in turn
    max_rows: int  # sequences that async_sampler decodes at once
    timeout: float  # seconds that an evaluation by async_sampler may take

    def __post_init__(self) -> None:
        check_positive(eval_problems=self.problems, max_rows=self.max_rows)
        if self.samples < 0:
            raise ValueError(f"evaluation samples: got {self.samples}, expected 0 for none or a number of them")
        if isinstance(self.by, str):
            raise ValueError(f"evaluation by: got {self.by!r}, expected a list of keys, such as ({self.by!r},)")
        if self.samples and (not self.ks or not all(1 <= k <= self.samples for k in self.ks)):
            raise ValueError(
                f"evaluation ks: got {[*self.ks]} with {self.samples} samples a problem, expected each of them from 1 "
                f"to {self.samples}"
            )
        grader_names(self.graders)

    def grade_answers(
        self, greedy: Sampler, sampled: Sampler, problems: Sequence[Problem], *, key: Tensor, score: Scorer
    ) -> list[GradedAnswer]:
        """Answers of two samplers to the problems, with their grades: see `evaluation.evaluate`."""
        return evaluate(
            greedy,
            sampled,
            problems,
            key=key,
            score=score,
            judges=self.graders,
            samples=self.samples,
            answer=self.extract_answer,
        )


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints: the interval between them and the number that is kept."""

    every: int  # steps
    keep_last: int  # newest checkpoints kept
    keep_best: int  # by held-out accuracy

    def __post_init__(self) -> None:
        check_positive(save_every=self.every, keep_last=self.keep_last)


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Records besides the metrics; their intervals are in steps, 0 for never."""

    keep_rollouts: int  # of the newest steps
    samples_every: int  # tables of completions in TensorBoard
    checksums_every: int  # of each step's quantities, for replay
    start_kl_every: int  # loss/kl_start, the KL to the start model, of which a frozen copy is kept then
    profile_steps: Sequence[int]  # of which torch.profiler keeps a trace
    mirror: Mirror  # metrics elsewhere, too


@dataclass(frozen=True, kw_only=True)
class Health:
    """Rules that watch the metrics: those of `trainer.health` by name, and functions of your own."""

    warn: Sequence[str | health.Rule]  # what these find is logged
    stop: Sequence[str | health.Rule]  # what these find ends the run, saved
    limits: Mapping[str, int | float]  # of rules by name, in the place of their own

    def __post_init__(self) -> None:
        health.check_rule_limits(self.limits)
        self.rules()

    def rules(self) -> tuple[list[health.Rule], list[health.Rule]]:
        """Those of `warn` and those of `stop`, with their limits."""
        return health.rules_with_limits(self.warn, self.limits), health.rules_with_limits(self.stop, self.limits)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that gin binds for a training run."""

    model: str | hf.ModelSource
    steps: int
    seed: int
    lora: LoRA | None
    teacher: Teacher | None
    demonstrations: Demonstrations | None
    data: Data
    compute: Compute
    sampling: Sampling
    episodes: Episodes | None
    curriculum: Curriculum | None
    rewards: Rewards
    algorithm: Algorithm | Stage
    policy: PolicyUpdate
    parallelism: Parallelism
    evaluation: Evaluation
    checkpoints: Checkpoints
    logging: Logging
    health: Health

    def __post_init__(self) -> None:
        check_positive(steps=self.steps)
        check_episodes(self.episodes, self.sampling)


def check_episodes(episodes: Episodes | None, sampling: Sampling) -> None:
    """Raise ValueError where limits do not fit episodes."""
    if episodes is None:
        return
    if sampling.stop:
        raise ValueError(
            f"sections.Sampling.stop: got {tuple(sampling.stop)} with sections.Episodes, expected (): a turn ends with "
            "the end token of its chat format"
        )
    if sampling.max_total_tokens is None:
        raise ValueError(
            "sections.Sampling.max_total_tokens: got None with sections.Episodes, expected the most tokens of an "
            "episode, opening, turns and observations together: every slot holds as many"
        )


def open_environments(
    episodes: Episodes | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[Environments | None, EnvironmentPool | nullcontext]:
    """The environments for samplers, and the context of their workers; None if rows have one turn.

    Raises ValueError for a tokenizer in whose chat format turns cannot be appended exactly.
    """
    if episodes is None:
        return None, nullcontext()
    pool = episodes.pool()
    return episodes.environments(tokenizer, pool), pool


def model_source(model: object, knob: str) -> hf.ModelSource:
    """The source of a knob's model: a folder or hub name, or a model factory. Raises ValueError for other values."""
    if isinstance(model, str):
        return hf.named_model(model)
    if not all(callable(getattr(model, method, None)) for method in ("config", "folder")):
        raise ValueError(
            f"{knob}: got a {type(model).__name__}, expected a Hugging Face folder or hub name, a GGUF file, or an "
            "object with config() and folder() (experiments.tiny.models.TinyModel)"
        )
    return model
