"""tools/import_config: what it writes can be launched, what it cannot carry is listed, and bad input is said."""

import json
import re
import tempfile
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import import_config as tool
import import_draft
import import_nemo_rl
import import_trl
import nemo_rl_program
import nemo_rl_yaml
import options_table
import pytest
import trl_program
import yaml
from e2e.running import TESTS
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import run
from grpo_fn.algo import distillation
from grpo_fn.config import freeze, load_config
from grpo_fn.shell.model import tiny_model
from grpo_fn.trainer.checks.algorithm import check_sampler_logp

CONFIGS = TESTS / "tools" / "configs"
ROOT = TESTS.parent
SAMPLES = {"nemo_rl.yaml": [], "trl.yaml": ["--world", "2"], "trl.py": ["--world", "2", "--rows", "7473"]}


@pytest.fixture(scope="module")
def given_params(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and rows for the file that was written."""
    folder = tmp_path_factory.mktemp("import")
    shape = tiny_model.Shape(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=1024)
    tiny_model.make_random(shape, folder / "model", seed=0, chat=False)
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"MODEL": folder / "model", "DATA": folder / "rows.jsonl", "rows.hold_out.test_size": 2}
    values |= {"sections.Evaluation.problems": 2}
    return [f"{name}={value}" for name, value in values.items()]


def written(name: str, folder: Path) -> Path:
    assert tool.main([str(CONFIGS / name), *SAMPLES[name], "--out", str(folder / "made.gin")]) == 0
    return folder / "made.gin"


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_written_says_what_it_would_be(
    name: str, given_params: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = written(name, tmp_path)
    notes = capsys.readouterr().err.strip().splitlines()
    assert [f"# {line}" for line in notes] == made.read_text().splitlines()[1 : 1 + len(notes)]
    params = [part for param in given_params for part in ("--gin_param", param)]
    assert run.main(["--gin_file", str(made), *params, "--dry_run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    rows = {"nemo_rl.yaml": "32 prompts x 16 samples = 512", "trl.yaml": "16 prompts x 8", "trl.py": "8 prompts x 8"}
    assert rows[name] in said
    updates = {"nemo_rl.yaml": "2 a step, 1000 in all", "trl.yaml": "8 a step, 400 in all", "trl.py": "1 a step, 2803"}
    assert updates[name] in said


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_keys_are_listed(name: str, tmp_path: Path) -> None:
    text = written(name, tmp_path).read_text()
    unknown = [line for line in text.splitlines() if line.startswith("# unknown: ")]
    assert len(unknown) == {"nemo_rl.yaml": 2, "trl.yaml": 0, "trl.py": 1}[name]
    assert all("made_up" in line for line in unknown)


# -- any configuration

NUMBERS = st.sampled_from([0, 1, 2, 0.1, 0.5, 1.5, 5.0, 1e-6, "1e-6", -1, 1e300, float("nan"), float("inf"), 10**400])
JUNK = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({}), st.just({"a": 1}))
COUNTS = st.sampled_from([1, 2, 4, 8, 8, 16])
TRL = {
    "per_device_train_batch_size": COUNTS,
    "gradient_accumulation_steps": COUNTS,
    "num_generations": st.sampled_from([2, 4, 8]),
    "steps_per_generation": st.one_of(st.none(), COUNTS),
    "generation_batch_size": st.one_of(st.none(), st.none(), st.sampled_from([16, 32, 48])),
    "num_iterations": st.integers(1, 3),
    "max_steps": st.integers(1, 500),
    "max_completion_length": st.integers(1, 4096),
    "loss_type": st.sampled_from([*import_trl.WEIGHTS, "real"]),
    "entropy_coef": st.sampled_from([0.0, 0.01, -0.01]),
    "model_name_or_path": st.sampled_from([None, "Qwen/Qwen3-0.6B", "@losses.cispo"]),
    "use_peft": st.booleans(),
    "lora_target_modules": st.sampled_from([None, ["q_proj"], "all-linear"]),
    "vespo_k_pos": st.sampled_from([2.0, 1.0]),
    "importance_sampling_level": st.sampled_from(["token", "token", "sequence"]),
    "epsilon": st.sampled_from([0.2, 0.1]),
    "epsilon_high": st.sampled_from([None, 0.28, 5.0]),
    "delta": st.sampled_from([None, None, 1.5, 0.5]),
    "beta": st.sampled_from([0.0, 0.04]),
    "use_bias_correction_kl": st.booleans(),
    "scale_rewards": st.sampled_from(["group", "batch", "none", "mean", True, False]),
    "mask_truncated_completions": st.booleans(),
    "learning_rate": st.sampled_from([1e-6, "1e-5", 0.0]),
    "lr_scheduler_type": st.sampled_from([*trl_program.SCHEDULES, "polynomial"]),
    "lr_scheduler_kwargs.min_lr": st.sampled_from([None, 1e-7, 1e-3]),
    "lr_scheduler_kwargs.min_lr_rate": st.sampled_from([None, 0.1, 2.0]),
    "warmup_ratio": st.sampled_from([0.0, 0.1]),
    "warmup_steps": st.sampled_from([0, 10, 0.05]),
    "optim": st.sampled_from([*trl_program.OPTIMIZERS]),
    "max_grad_norm": st.sampled_from([1.0, 0, 0.1]),
    "weight_decay": st.sampled_from([0.0, 0.01]),
    "temperature": st.sampled_from([1.0, 0.7]),
    "bf16": st.booleans(),
    "fp16": st.booleans(),
    "gradient_checkpointing": st.booleans(),
    "torch_compile": st.booleans(),
    "torch_compile_mode": st.sampled_from([None, "default", "max-autotune"]),
    "fsdp": st.sampled_from(["", "full_shard auto_wrap", "shard_grad_op offload", ["no_shard"], True]),
    "save_steps": st.sampled_from([100, 0.1]),
    "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
    "save_total_limit": st.sampled_from([None, 3]),
    "seed": st.integers(0, 99),
    "use_vllm": st.booleans(),
    "vllm_mode": st.sampled_from(["server", "colocate", "colocate", "elsewhere"]),
    "vllm_server_base_url": st.sampled_from([None, "http://gpu-a:8000", "@losses.cispo"]),
    "vllm_gpu_memory_utilization": st.sampled_from([0.3, 0.9, 1.1]),
    "vllm_tensor_parallel_size": st.sampled_from([1, 2]),
    "vllm_importance_sampling_correction": st.booleans(),
    "vllm_importance_sampling_mode": st.sampled_from([*import_trl.CORRECTIONS, "none"]),
    "vllm_importance_sampling_cap": st.sampled_from([2.0, 3.0, 0.5]),
    "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5]),
    "vllm_importance_sampling_clip_max": st.sampled_from([None, 2.0, 5.0]),
    "off_policy_mask_threshold": st.sampled_from([None, 0.5, -1]),
    "top_p": st.just(0.9),
}
NEMO = {
    "grpo.num_prompts_per_step": COUNTS,
    "grpo.num_generations_per_prompt": COUNTS,
    "grpo.max_num_steps": st.integers(1, 500),
    "grpo.normalize_rewards": st.booleans(),
    "grpo.use_leave_one_out_baseline": st.booleans(),
    "grpo.adv_estimator.normalize_rewards": st.booleans(),
    "grpo.use_dynamic_sampling": st.booleans(),
    "grpo.overlong_filtering": st.booleans(),
    "grpo.reward_shaping.enabled": st.booleans(),
    "grpo.reward_shaping.overlong_buffer_length": st.sampled_from([16, 1024]),
    "loss_fn.reference_policy_kl_penalty": st.sampled_from([0.0, 0.01]),
    "loss_fn.reference_policy_kl_type": st.sampled_from(["k1", "k2", "k3", "k4"]),
    "loss_fn.use_on_policy_kl_approximation": st.booleans(),
    "loss_fn.ratio_clip_c": st.sampled_from([None, None, 3, 1]),
    "loss_fn.sequence_level_importance_ratios": st.booleans(),
    "loss_fn.token_level_loss": st.booleans(),
    "loss_fn.force_on_policy_ratio": st.booleans(),
    "policy.model_name": st.sampled_from(["a/b", "@math.correct", "%X", "it's"]),
    "policy.train_global_batch_size": st.one_of(st.none(), COUNTS),
    "policy.max_total_sequence_length": st.sampled_from([64, 512]),
    "policy.precision": st.sampled_from([*nemo_rl_program.PRECISIONS, "fp8"]),
    "policy.dtensor_cfg.cpu_offload": st.booleans(),
    "policy.dtensor_cfg.tensor_parallel_size": st.sampled_from([1, 2]),
    "policy.dtensor_cfg.lora_cfg.enabled": st.booleans(),
    "policy.dtensor_cfg.lora_cfg.match_all_linear": st.booleans(),
    "policy.dtensor_cfg.lora_cfg.target_modules": st.sampled_from([[], ["q_proj", "v_proj"]]),
    "policy.generation.stop_strings": st.sampled_from([None, ["</s>"], ["@losses.cispo", "%STEPS", "a\nb"]]),
    "policy.generation.max_new_tokens": st.sampled_from([8, "${policy.max_total_sequence_length}", "${policy.gone}"]),
    "policy.optimizer.kwargs.betas": st.sampled_from([[0.9, 0.999], [0.9], [2, 0.5]]),
    "policy.generation.backend": st.sampled_from(["vllm", "vllm", "sglang"]),
    "policy.generation.colocated.enabled": st.booleans(),
    "policy.generation.vllm_cfg.gpu_memory_utilization": st.sampled_from([0.6, 2]),
    "policy.generation.vllm_cfg.enforce_eager": st.booleans(),
    "grpo.async_grpo.enabled": st.booleans(),
    "grpo.async_grpo.max_trajectory_age_steps": st.sampled_from([1, 2]),
    "grpo.async_grpo.in_flight_weight_updates": st.booleans(),
    "loss_fn.use_importance_sampling_correction": st.booleans(),
    "loss_fn.truncated_importance_sampling_ratio": st.sampled_from([None, 2.0, 1.002]),
    "loss_fn.truncated_importance_sampling_ratio_min": st.sampled_from([None, 0.5]),
    "loss_fn.truncated_importance_sampling_type": st.sampled_from([None, "tis", "icepop", "seq-mask-tis", "odd"]),
    "data.dataset_name": st.sampled_from(["OpenMathInstruct-2", "mine"]),
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A mapping of mappings from dotted keys."""
    whole: dict[str, Any] = {"grpo": {}}
    for key, value in flat.items():
        *folders, last = key.split(".")
        place = whole
        for name in folders:
            place = place.setdefault(name, {})
        place[last] = value
    return whole


def carried(config: dict[str, Any], *, nemo: bool) -> import_draft.Draft | str:
    """The draft, or what is said instead."""
    try:
        return tool.from_nemo_rl(config) if nemo else tool.from_trl(config, 2, None)
    except ValueError as error:
        return str(error)


def reasonable(said: str) -> bool:
    return "got" in said and "wanted" in said


@pytest.mark.parametrize("nemo", [False, True], ids=["trl", "nemo_rl"])
@given(st.data())
def test_a_configuration_of_known_keys_can_be_launched_or_says_why_not(nemo: bool, data: st.DataObject) -> None:
    flat = data.draw(st.fixed_dictionaries({}, optional=NEMO if nemo else TRL))
    flat.setdefault("grpo.max_num_steps" if nemo else "max_steps", 7)
    made = carried(nested(flat) if nemo else flat, nemo=nemo)
    if isinstance(made, str):
        assert reasonable(made), made
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.gin"
        path.write_text(made.text("x"), encoding="utf-8")
        given = [f"{macro}=m" for macro in ("MODEL", "DATA") if macro not in made.macros]
        config = load_config([str(path)], given)
    algorithm = freeze(config.root.knobs["algorithm"], {})
    check_sampler_logp(algorithm, config.root.knobs["sampling"].knobs["max_staleness"])
    if nemo:
        assert (algorithm.prompts, algorithm.group_size) == tuple(
            flat.get(key, value)
            for key, value in (("grpo.num_prompts_per_step", 32), ("grpo.num_generations_per_prompt", 16))
        )
        assert config.root.knobs["steps"] == flat["grpo.max_num_steps"]
    else:
        update = flat.get("per_device_train_batch_size", 8) * 2 * flat.get("gradient_accumulation_steps", 1)
        rows = algorithm.prompts * algorithm.group_size / algorithm.minibatches
        assert rows == update or any("would split groups" in said for _, _, said in made.notes)
        assert algorithm.prompts % algorithm.minibatches == 0


ARITHMETIC = {  # a device, processes, accumulation, steps a generation, group: prompts, minibatches
    (4, 2, 8, None, 8): (8, 1),
    (4, 2, 8, 32, 8): (32, 4),
    (4, 2, 8, 2, 8): (8, 1),
    (2, 1, 1, 8, 2): (8, 8),
    (2, 1, 1, 4, 8): (1, 1),  # four optimizer steps of a quarter group each: a group is not split
}


@pytest.mark.parametrize("case", ARITHMETIC)
def test_completions_become_prompts_and_minibatches(case: tuple[int | None, ...]) -> None:
    device, world, accumulate, rounds, group = case
    config = {"per_device_train_batch_size": device, "gradient_accumulation_steps": accumulate, "max_steps": 1}
    made = tool.from_trl(config | {"steps_per_generation": rounds, "num_generations": group}, world, None)
    found = tuple(made.knobs[f"step.Algorithm.{name}"] for name in ("prompts", "minibatches"))
    assert found == ARITHMETIC[case]


@pytest.mark.parametrize("nemo", [False, True], ids=["trl", "nemo_rl"])
@given(st.data())
def test_whatever_stands_there_is_carried_listed_or_refused(nemo: bool, data: st.DataObject) -> None:
    known = NEMO if nemo else TRL
    odd = data.draw(st.dictionaries(st.sampled_from([*known]), JUNK, max_size=2))
    keys = st.text(st.characters(exclude_characters="."), min_size=1, max_size=6)
    strange = data.draw(st.dictionaries(keys, JUNK, max_size=2))
    flat = dict(odd)
    flat.setdefault("grpo.max_num_steps" if nemo else "max_steps", 7)
    config = nested(flat) if nemo else dict(flat)
    config = {**{f"zz{key}": value for key, value in strange.items()}, **config}
    made = carried(config, nemo=nemo)
    if isinstance(made, str):
        assert reasonable(made), made
        return
    text = made.text("x")
    compile_comments(text)
    for key in strange:
        shown = import_draft.one_line(f"unknown: zz{key}")
        assert any(line.startswith(f"# {shown}") for line in text.splitlines()), (key, text)


def compile_comments(text: str) -> None:
    """Nothing of the original gets out of its comment: before the first statement there are comments alone."""
    head = text.split("from __gin__ import dynamic_registration\n")[0]
    assert all(line.startswith("# ") for line in head.splitlines()), head
    text.encode("utf-8")


def test_every_key_of_nemo_rls_file_is_carried_or_listed() -> None:
    config = yaml.safe_load((CONFIGS / "nemo_rl.yaml").read_text())
    made = tool.from_nemo_rl(config)
    reader = import_draft.Reader(nemo_rl_yaml.interpolated(config))
    text = "\n".join(made.listed())
    taken = {key for key in reader.values if not re.search(rf"\b{re.escape(key)}\b", text)}
    assert {"grpo.num_prompts_per_step", "policy.dtensor_cfg.lora_cfg.dim", "loss_fn.ratio_clip_max"} <= taken
    assert not taken & {"made_up.knob", "made_up.empty", "cluster.num_nodes", "policy.generation.vllm_kwargs"}


# -- engines, and what their samples are worth

OF_TRL = {  # a configuration: the engine file, and some of what is bound
    "local": ({}, None, {}),
    "colocated": (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
        "engine/vllm_colocated.gin",
        {
            "vllm_sampler.colocated_sampler.gpu_memory_utilization": 0.3,
            "vllm_sampler.colocated_sampler.tensor_parallel": 2,
        },
    ),
    "server": (
        {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "gpu-a", "vllm_server_port": 8001},
        "engine/vllm_dedicated.gin",
        {"SERVERS": ["http://gpu-a:8001"]},
    ),
    "the older name of a bound": (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_cap": 4.0},
        "engine/vllm_colocated.gin",
        {"importance.masked_weight.low": 0.0, "importance.masked_weight.high": 4.0},
    ),
    "a row's weight": (
        {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.9},
        "engine/vllm_colocated.gin",
        {"importance.sequence_masked_weight.low": 0.9, "importance.sequence_masked_weight.high": 3.0},
    ),
    "nothing corrected": (
        {"use_vllm": True, "vllm_importance_sampling_correction": False},
        "engine/vllm_colocated.gin",
        {"step.Algorithm.old_logp": "@step.from_trainer", "objective.policy_objective.importance_correction": None},
    ),
    "a mask alone": (
        {"off_policy_mask_threshold": 0.5},
        None,
        {
            "objective.policy_objective.importance_correction": "@importance.off_policy_sequence_mask",
            "step.Algorithm.old_logp": None,
        },
    ),
    "a mask and a weight": (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "off_policy_mask_threshold": 0.5},
        "engine/vllm_colocated.gin",
        {
            "objective.policy_objective.importance_correction": "@importance.weight_and_mask",
            "importance.weight_and_mask.weight": "@importance.truncated_weight",
            "importance.weight_and_mask.mask": "@importance.off_policy_sequence_mask",
        },
    ),
}
VLLM = {"policy.generation.backend": "vllm"}
TIS = "loss_fn.truncated_importance_sampling_"
ON = {"loss_fn.use_importance_sampling_correction": True}
AHEAD = {"policy.generation.colocated.enabled": False, "grpo.async_grpo.enabled": True} | VLLM | ON
OF_NEMO = {
    "local": ({"policy.generation.backend": "sglang"}, None, {}),
    "colocated": (
        {"policy.generation.vllm_cfg.enforce_eager": True} | VLLM,
        "engine/vllm_colocated.gin",
        {
            "vllm_sampler.colocated_sampler.gpu_memory_utilization": 0.6,
            "vllm_sampler.colocated_sampler.enforce_eager": True,
        },
    ),
    "ahead": (
        {"grpo.async_grpo.max_trajectory_age_steps": 3, "grpo.async_grpo.in_flight_weight_updates": True} | AHEAD,
        "engine/async_one_step.gin",
        {
            "sections.Sampling.max_staleness": 3,
            "vllm_servers.DedicatedEngine.pause": "keep",
            "importance.truncated_weight.cap": 1e15,
        },
    ),
    "tis": (ON | {f"{TIS}ratio": 2.0}, None, {"importance.truncated_weight.cap": 2.0}),
    "icepop": (
        ON | {f"{TIS}ratio": 5.0, f"{TIS}ratio_min": 0.5, f"{TIS}type": "icepop"},
        None,
        {"importance.masked_weight.low": 0.5, "importance.masked_weight.high": 5.0},
    ),
    "seq-mask-tis": (
        ON | {f"{TIS}ratio": 1.002, f"{TIS}ratio_min": 0.999, f"{TIS}type": "seq-mask-tis"},
        None,
        {
            "importance.weight_and_mask.weight": "@importance.truncated_weight",
            "importance.weight_and_mask.mask": "@importance.sequence_masked_weight",
            "importance.truncated_weight.cap": 1e15,
            "importance.sequence_masked_weight.high": 1.002,
        },
    ),
}
CASES = [(False, name) for name in OF_TRL] + [(True, name) for name in OF_NEMO]


@pytest.mark.parametrize(("nemo", "name"), CASES)
def test_an_engine_and_a_correction_are_carried(nemo: bool, name: str, tmp_path: Path) -> None:
    flat, file, bound = (OF_NEMO if nemo else OF_TRL)[name]
    made = carried(nested(flat | {"grpo.max_num_steps": 7}) if nemo else flat | {"max_steps": 7}, nemo=nemo)
    assert isinstance(made, import_draft.Draft), made
    engines = [include for include in made.includes if include.startswith("engine/")]
    assert engines[-1:] == ([] if file is None else [file])
    found = made.knobs | made.macros
    assert {knob: found.get(knob) for knob in bound} == bound
    (tmp_path / "made.gin").write_text(made.text("x"))
    given = [f"{macro}=m" for macro in ("MODEL", "DATA") if macro not in made.macros]
    knobs = load_config([str(tmp_path / "made.gin")], given).root.knobs
    check_sampler_logp(freeze(knobs["algorithm"], {}), knobs["sampling"].knobs["max_staleness"])


# -- schedules

MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5, "warmup_steps": 3}


@pytest.mark.parametrize(
    ("flat", "bound"),
    [
        ({}, {"": "linear_decay", "warmup": 0, "total": 40, "final": 0.0}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, {"": "constant", "warmup": 0}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, {"": "constant", "warmup": 4}),
        ({"lr_scheduler_type": "cosine"}, {"": "cosine_decay", "warmup": 0, "total": 40, "final": 0.0}),
        (MIN_LR | {"lr_scheduler_kwargs": {"min_lr": 1e-6}}, {"": "cosine_decay", "warmup": 3, "final": 0.1}),
        (MIN_LR | {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, {"": "cosine_decay", "total": 40, "final": 0.2}),
    ],
)
def test_a_schedule_of_trl_is_carried(flat: dict[str, Any], bound: dict[str, Any]) -> None:
    made = carried({"max_steps": 40, **flat}, nemo=False)
    assert isinstance(made, import_draft.Draft), made
    name = bound[""]
    assert made.knobs["sections.PolicyUpdate.schedule"] == f"@optimizer.{name}"
    found = {knob: made.knobs.get(f"optimizer.{name}.{knob}") for knob in bound if knob}
    assert found == {knob: pytest.approx(value) for knob, value in bound.items() if knob}
    assert "lr_scheduler" not in "\n".join(made.listed())  # as it is there: nothing to say


@pytest.mark.parametrize("kwargs", [{}, {"min_lr": 1e-4}, {"min_lr_rate": 2.0}, {"min_lr": 1e-6, "min_lr_rate": 0.1}])
def test_a_floor_that_is_missing_double_or_above_the_rate_is_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs\.min_lr: got \[.*\] of the rate, wanted one of min_lr"):
        import_trl.from_trl({"max_steps": 40, **MIN_LR, "lr_scheduler_kwargs": kwargs}, 2, None)


def trl_draft(**config: Any) -> import_draft.Draft:
    """With 7,473 rows on 2 devices."""
    return import_trl.from_trl({"max_steps": 40, "num_generations": 4} | config, 2, 7473)


def test_every_option_of_trl_1_16_is_known_and_on_the_page() -> None:
    """Its 79 fields with their defaults: none is unknown to the importer, and the page has a line of each."""
    fields = options_table.trl_options()
    assert len(fields) == 79
    made = trl_draft(**fields)
    assert not [key for kind, key, _ in made.notes if kind == import_draft.UNKNOWN]
    assert set(fields) <= lines_of_options()


def lines_of_options() -> set[str]:
    page = (ROOT / "docs" / "migrating" / "import_options.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([\w.]+)` \| \w", page, re.MULTILINE))


def test_every_key_of_nemo_rls_examples_is_known_and_on_the_page() -> None:
    keys = options_table.nemo_keys()
    assert len(keys) > 350
    assert set(keys) <= lines_of_options()


def test_the_page_of_options_is_what_the_importer_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_table.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["DistillationConfig", "GKDConfig", "IWOPDConfig"])
def test_a_configuration_of_trls_distillation_is_refused_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {
        "DistillationConfig": "teacher_model_name_or_path='a'",
        "GKDConfig": "lmbda=0.5",
        "IWOPDConfig": "iw_opd_gamma=1",
    }
    (tmp_path / "c.py").write_text(f"{kind}({own[kind]}, learning_rate=1e-6)")
    assert tool.main([str(tmp_path / "c.py")]) == 2
    assert "wanted a GRPOConfig; algo/opd.gin and algo/iw_opd.gin" in capsys.readouterr().err


def test_a_teacher_of_nemo_rl_is_carried_and_several_are_refused(tmp_path: Path) -> None:
    teachers = "on_policy_distillation.teacher_model_by_agent_name"
    flat = {"grpo.max_num_steps": 7, "grpo.adv_estimator.name": "opd", f"{teachers}.a": "T/1", f"{teachers}.b": "T/1"}
    made = import_nemo_rl.from_nemo_rl(nested(flat))
    assert made.macros["TEACHER"] == "T/1"
    (tmp_path / "made.gin").write_text(made.text("x"))
    knobs = load_config([str(tmp_path / "made.gin")], ["MODEL=m", "DATA=m"]).root.knobs
    credit = freeze(knobs["algorithm"], {}).credit
    assert credit.func is distillation.teacher_gap
    assert credit.keywords == {"credit": None, "share": None, "coef": 1.0}
    for changes in ({f"{teachers}.b": "T/2"}, {f"{teachers}.a": None, f"{teachers}.b": None}):
        with pytest.raises(ValueError, match=r"with adv_estimator opd, wanted one model"):
            import_nemo_rl.from_nemo_rl(nested(flat | changes))


def test_nemo_rls_distillation_of_logits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("distillation: {max_num_steps: 1}\npolicy: {model_name: a}\n")
    assert tool.main([str(tmp_path / "c.yaml")]) == 2
    assert "distillation: got NeMo-RL's distillation of a teacher's top logits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, {"sections.Sampling.max_new_tokens": "%MAX_NEW_TOKENS", "objective.policy_objective.kl": "@kl.k3_ratio"}),
        ({"use_bias_correction_kl": False}, {"objective.policy_objective.kl": "@kl.k3"}),
        ({"entropy_coef": 0.01}, {"objective.policy_objective.entropy_bonus": 0.01}),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            {
                "objective.policy_objective.token_loss": "@losses.sequence_ratio",
                "objective.policy_objective.loss_aggregation": "@aggregation.constant_length_over_samples",
                "aggregation.constant_length_over_samples.max_length": 1,
            },
        ),
        ({"loss_type": "luspo"}, {"objective.policy_objective.token_loss": "@losses.clipped_ratio"}),
        (  # good tokens are bounded at delta there, bad ones at 1 + epsilon_high
            {"delta": 1.1},
            {"losses.dual_clip.clip_low": 0.2, "losses.dual_clip.clip_high": 0.1, "losses.dual_clip.cap": 1.2},
        ),
        (
            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
            {"objective.policy_objective.importance_correction": None, "importance.masked_weight.high": None},
        ),
        (
            {
                **{"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
                "vllm_importance_sampling_clip_max": None,
            },
            {"importance.masked_weight.low": 0.0, "importance.masked_weight.high": 1e9},
        ),
        (
            {"loss_type": "vespo", "vespo_k_neg": 4.0},
            {
                "objective.policy_objective.token_loss": "@weighted_losses.vespo",
                "weighted_losses.vespo.k_positive": 2.0,
                "weighted_losses.vespo.lambda_positive": 3.0,
                "weighted_losses.vespo.k_negative": 4.0,
                "weighted_losses.vespo.lambda_negative": 2.0,
            },
        ),
        (
            {"scale_rewards": "batch"},
            {
                "step.Algorithm.credit": "@credit.batch_scaled",
                "credit.batch_scaled.credit": "@credit.outcome",
                "credit.batch_scaled.eps": 1e-4,
                "credit.outcome.advantage": "@advantage.mean_centered",
            },
        ),
        ({"eval_strategy": "epoch"}, {"sections.Evaluation.every": 1869}),  # 7,473 rows, 4 prompts a step
        (
            {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"]},
            {
                "lora.LoRA.rank": 8,
                "lora.LoRA.alpha": 32.0,
                "lora.LoRA.dropout": 0.05,
                "lora.LoRA.targets": ["q_proj"],
            },
        ),
        (
            {
                **{"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
                **{"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.5},
            },
            {"importance.masked_weight.low": 0.5, "importance.masked_weight.high": 1e9},
        ),
    ],
)
def test_an_option_of_trl_1_16_is_carried(config: dict[str, Any], bound: dict[str, Any]) -> None:
    made = trl_draft(**config)
    assert {knob: made.knobs.get(knob) for knob in bound} == bound


def test_the_model_and_the_lengths_of_trl_1_16() -> None:
    made = trl_draft(model_name_or_path="Qwen/Qwen3-0.6B", use_vllm=True)
    assert (made.macros["MODEL"], made.macros["MAX_NEW_TOKENS"]) == ("Qwen/Qwen3-0.6B", 512)
    assert "engine/vllm_colocated.gin" in made.includes  # the default of vllm_mode there


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"generation_batch_size": 32}, "steps_per_generation: TRL shuffles completions into its minibatches"),
        ({"generation_batch_size": 32}, "dapo divides by the tokens of each optimizer step here; there by those of"),
        (
            {"scale_rewards": "batch", "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            "the std of each generation",
        ),
        (
            {"entropy_coef": 0.1, "gradient_accumulation_steps": 2},
            "entropy_coef: a mean over the tokens of each micro-batch",
        ),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "a KL is weighed with its row's ratio there"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, "entropy_coef: a mean over the tokens of each micro-batch there"),
        (
            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
            "vespo: a row's weight is to the sampler here",
        ),
        ({"use_adaptive_entropy": True}, "controllers.adaptive_entropy"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16: what trains is kept in float32"),
    ],
)
def test_what_differs_from_trl_1_16_is_said(config: dict[str, Any], said: str) -> None:
    assert said in "\n".join(trl_draft(**config).listed())
    assert said not in "\n".join(trl_draft().listed())


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        ({"eval_strategy": "epoch"}, None, "eval_strategy: got 'epoch', wanted --rows"),
        (
            {
                **{"use_vllm": True, "vllm_importance_sampling_clip_max": None},
                "vllm_importance_sampling_mode": "token_truncate",
            },
            None,
            "vllm_importance_sampling_clip_max: got None without a clip_min",
        ),
        (
            {"loss_type": "vespo", "use_vllm": True},
            None,
            "vllm_importance_sampling_mode: got a sequence's with loss_type",
        ),
        (
            {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            None,
            "num_iterations: got 2 with 16 completions sampled at a time and 32 an optimizer step",
        ),
        ({"scale_rewards": "mean"}, None, "scale_rewards: got 'mean', wanted group"),
    ],
)
def test_what_trl_1_16_takes_and_we_cannot_is_refused(config: dict[str, Any], rows: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        import_trl.from_trl({"max_steps": 40, "num_generations": 4} | config, 2, rows)


def test_a_warm_up_of_nemo_rl_counts_steps_and_ours_updates() -> None:
    stages = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 50}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000000000}},
    ]
    flat = {"grpo.num_prompts_per_step": 8, "grpo.num_generations_per_prompt": 8, "grpo.max_num_steps": 7}
    made = carried(nested(flat | {"policy.train_global_batch_size": 16, "policy.scheduler": stages}), nemo=True)
    assert isinstance(made, import_draft.Draft), made
    assert made.knobs["step.Algorithm.minibatches"] == 4
    assert made.knobs["optimizer.constant.warmup"] == 200
    assert "in 50 steps there; from 1/201 to 1 in 200 updates here" in "\n".join(made.listed())


# -- NeMo-RL of August 2026

NEMO_STEP = {"grpo": {"max_num_steps": 7}}


def nemo_draft(**config: Any) -> import_draft.Draft:
    """A configuration of nested mappings, laid over one of seven steps."""
    return import_nemo_rl.from_nemo_rl(nemo_rl_yaml.laid_over(NEMO_STEP, config))


def test_a_file_is_read_with_those_it_is_laid_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(
        "grpo: {max_num_steps: 9, num_prompts_per_step: 8, num_generations_per_prompt: 4}\n"
        "policy: {train_global_batch_size: 32, optimizer: {kwargs: {lr: 1.0e-5, eps: 1.0e-6}}}\n"
        "loss_fn: {ratio_clip_max: 0.3}\n"
    )
    (tmp_path / "sub" / "own.yaml").write_text(
        "defaults: ../base.yaml\ngrpo: {max_num_steps: 5}\n"
        "policy: {optimizer: {_override_: true, kwargs: {lr: 2.0e-5}}}\nloss_fn: {ratio_clip_min: 0.1}\n"
    )
    assert tool.main([str(tmp_path / "sub" / "own.yaml"), "--out", str(tmp_path / "made.gin")]) == 0
    text = (tmp_path / "made.gin").read_text()
    wanted = ["STEPS = 5", "prompts = 8", "adamw.lr = 2e-05", "adamw.eps = 1e-08", "clip_low = 0.1", "clip_high = 0.3"]
    assert [part for part in wanted if part not in text] == []
    capsys.readouterr()
    (tmp_path / "base.yaml").write_text("defaults: sub/own.yaml\ngrpo: {}\n")
    assert tool.main([str(tmp_path / "sub" / "own.yaml")]) == 2
    assert "got defaults that lead back to it, wanted files below one another" in capsys.readouterr().err
    (tmp_path / "base.yaml").unlink()
    assert tool.main([str(tmp_path / "sub" / "own.yaml")]) == 2
    assert "base.yaml, which cannot be read" in capsys.readouterr().err


def test_a_reference_may_be_relative() -> None:
    config = {"a": {"b": {"x": 1, "y": "${.x}", "z": "${..c}", "far": "${.y}"}, "c": "${mul:${.b.x}, 3}"}}
    found = nemo_rl_yaml.interpolated(config)
    assert found == {"a.b.x": 1, "a.b.y": 1, "a.b.z": 3, "a.b.far": 1, "a.c": 3}
    with pytest.raises(ValueError, match=r"got \$\{\.no\} at a\.b, wanted a key of the file"):
        nemo_rl_yaml.interpolated({"a": {"b": "${.no}"}})


@pytest.mark.parametrize(
    ("config", "bound", "said"),
    [
        ({}, {"objective.policy_objective.kl": "@kl.k3_ratio"}, None),
        (
            {"loss_fn": {"reference_policy_kl_penalty": 0.01}},
            {"objective.policy_objective.beta": 0.01},
            "the gradient of a step's first update is the same",
        ),
        (
            {"loss_fn": {"use_cispo": True, "ratio_clip_max": 4.0}},
            {"objective.policy_objective.token_loss": "@losses.cispo", "losses.cispo.clip_high": 4.0},
            "the ratio is at least 0.8 there",
        ),
        (
            {
                "grpo": {
                    "adv_estimator": {"name": "gdpo", "normalize_rewards": True, "use_leave_one_out_baseline": False}
                }
            },
            {
                "step.Algorithm.credit": "@credit.row_whitened",
                "credit.row_whitened.credit": "@credit.per_part",
                "credit.per_part.advantage": "@advantage.group_normalized",
                "credit.outcome.advantage": None,
            },
            "credit.per_part.weights names the parts",
        ),
        (
            {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}}},
            {
                "step.Algorithm.credit": "@credit.token_whitened",
                "credit.token_whitened.credit": "@credit.outcome",
                "credit.outcome.advantage": "@advantage.mean_centered",
            },
            None,
        ),
        (
            {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}}},
            {"credit.token_whitened.credit": "@credit.reward_to_go", "credit.reward_to_go.beta": 0.0},
            None,
        ),
        (
            {"grpo": {"max_val_samples": 960, "val_period": -1}},
            {"sections.Evaluation.problems": 256, "sections.Evaluation.every": 0},
            "grpo.max_val_samples: 960 there; the task's file here holds out 256",
        ),
        ({"grpo": {"max_num_epochs": 1}}, {}, "7 here; there also at most 1 epochs of the rows"),
        (
            {"grpo": {"reward_shaping": {"enabled": True, "overlong_buffer_length": 16, "max_response_length": 100}}},
            {"length.soft_overlong_punishment.max_length": 100},
            "beyond 100 tokens the penalty grows on there",
        ),
        (
            {"policy": {"optimizer": {"name": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"}}},
            {"sections.PolicyUpdate.optimizer": "@optimizer.adamw"},
            None,
        ),
    ],
)
def test_a_key_of_nemo_rl_is_carried(config: dict[str, Any], bound: dict[str, Any], said: str | None) -> None:
    made = nemo_draft(**config)
    assert {knob: made.knobs.get(knob) for knob in bound} == bound
    if said:
        assert said in "\n".join(made.listed())
        assert said not in "\n".join(nemo_draft().listed())


def test_epochs_of_nemo_rl_end_a_run_where_the_rows_are_known() -> None:
    config = {"grpo": {"max_num_steps": 1000000, "max_num_epochs": 2, "num_prompts_per_step": 32}}
    assert import_nemo_rl.from_nemo_rl(config, 100).macros["STEPS"] == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_fn": {"use_cispo": True, "ratio_clip_c": 3.0}}, "loss_fn.use_cispo: got it with another ratio"),
        (
            {"loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1}},
            "loss_fn.use_kl_in_reward: got true, which takes each token's own KL",
        ),
        ({"policy": {"optimizer": {"name": "torch.optim.SGD"}}}, "policy.optimizer.name: got 'torch.optim.SGD'"),
    ],
)
def test_what_nemo_rl_takes_and_we_cannot_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        nemo_draft(**config)


# -- bad files

BAD = {
    "not there": (None, ["cannot be read", "wanted a configuration"]),
    "no mapping": ("[1, 2]", ["got list", "wanted keys and values"]),
    "broken": ("{a: [", ["wanted JSON or YAML"]),
    "of verl": ("actor_rollout_ref: {actor: {}}", ["got a configuration of verl", "from_verl.md"]),
    "of something else": ("layers: 12", ["got the keys layers", "wanted `grpo`"]),
    "no steps": ("learning_rate: 1e-6", ["got none", "wanted --rows"]),
    "a word for a number": ("{num_generations: many, max_steps: 1}", ["num_generations: got 'many'", "wanted int"]),
    "both batches": (
        "{num_generations: 8, max_steps: 1, generation_batch_size: 8, steps_per_generation: 2}",
        ["wanted one of them"],
    ),
    "groups that do not fit": (
        "{num_generations: 7, max_steps: 1}",
        ["generation_batch_size: got 8", "multiple of num_generations 7"],
    ),
    "a loss of its own": ("{loss_type: real, max_steps: 1}", ["loss_type: got 'real'", "wanted one of grpo"]),
    "round in circles": ("grpo: {max_num_steps: '${grpo.max_num_steps}'}", ["refers to itself"]),
    "an engine beyond the device": (
        "{use_vllm: true, vllm_mode: colocate, vllm_gpu_memory_utilization: 1.5, max_steps: 1, num_generations: 8}",
        ["vllm_gpu_memory_utilization: got 1.5", "wanted at most 1"],
    ),
    "a bound below 1": (
        "{use_vllm: true, vllm_importance_sampling_cap: 0.5, max_steps: 1, num_generations: 8}",
        ["vllm_importance_sampling_clip_max: got 0 to 0.5", "wanted 1 within"],
    ),
    "ahead of itself": (
        "grpo: {max_num_steps: 1, async_grpo: {enabled: true}}",
        ["async_grpo.enabled: got true", "backend vllm with colocated.enabled false"],
    ),
    "ahead, uncorrected": (
        "{grpo: {max_num_steps: 1, async_grpo: {enabled: true}}, "
        "policy: {generation: {backend: vllm, colocated: {enabled: false}}}}",
        ["use_importance_sampling_correction: got false", "wanted true"],
    ),
    "Megatron": (
        "{grpo: {max_num_steps: 1}, policy: {megatron_cfg: {enabled: true}}}",
        ["megatron_cfg.enabled: got true", "wanted a file for dtensor_cfg"],
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_one_line(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = BAD[fault]
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert tool.main([str(path), "--out", str(tmp_path / "made.gin")]) == 2
    out = capsys.readouterr()
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert "got" in out.err or fault == "broken"
    for part in said:
        assert part in out.err, out.err
    assert not (tmp_path / "made.gin").exists()


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = written("trl.yaml", tmp_path)
    before = made.read_text()
    assert tool.main([str(CONFIGS / "trl.yaml"), "--out", str(made)]) == 2
    assert "which exists" in capsys.readouterr().err
    assert made.read_text() == before


@pytest.mark.parametrize("form", ["json", "literal", "call"])
def test_a_configuration_means_the_same_in_every_form(form: str, tmp_path: Path) -> None:
    config = {"num_generations": 4, "max_steps": 3, "loss_type": "dr_grpo", "bf16": False}
    texts = {
        "json": ("c.json", json.dumps(config)),
        "literal": ("c.py", repr(config)),
        "call": ("c.py", "a = GRPOConfig(" + ", ".join(f"{k}={v!r}" for k, v in config.items()) + ")"),
    }
    name, text = texts[form]
    (tmp_path / name).write_text(text)
    assert tool.read(tmp_path / name) == config


def test_python_is_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text(f"GRPOConfig(seed=open({str(tmp_path / 'ran')!r}, 'w'))")
    assert tool.main([str(tmp_path / "c.py")]) == 2
    assert not (tmp_path / "ran").exists()


# -- the pages

PAGES = sorted((TESTS.parent / "docs" / "migrating").glob("from_*.md"))
PACKAGES = [f"grpo_fn.{name}" for name in ("algo", "rewards", "tasks", "trainer", "analysis", "core", "shell.logging")]
PACKAGES += [
    f"grpo_fn.shell.{name}" for name in ("model", "policy", "vllm", "sampler", "sampler.local", "reward_workers")
]


def imported_module(name: str) -> ModuleType | None:
    """The module that gin files import under that name."""
    found = [f"{place}.{name}" for place in ("grpo_fn", *PACKAGES) if find_spec(f"{place}.{name}")]
    return import_module(found[0]) if found else None


def ours(text: str) -> list[str]:
    """What a page names of ours: the second cell of every row, and references anywhere."""
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("|") and line.count("|") >= 3]
    return [
        *re.findall(r"`([a-z_]+\.[A-Za-z_]\w*(?:\.\w+)?)(?:`| =)", " ".join(cells)),
        *re.findall(r"@([\w.]+\w)", text),
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_names_only_functions_and_knobs_that_there_are(path: Path) -> None:
    named = [name for name in ours(path.read_text()) if name != "module.function"]
    assert len(named) > 20
    for name in named:
        place, function, *knob = name.split(".")
        module = imported_module(place)
        assert module is not None, name
        assert hasattr(module, function), name
        assert not knob or knob[0] in signature(getattr(module, function)).parameters, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_names_only_files_that_there_are(path: Path) -> None:
    text = path.read_text()
    files = set(re.findall(r"\b(?:algo|engine|eval|run|scale|task)/\w+\.gin", text))
    assert files
    assert all((TESTS.parent / "gin" / name).exists() for name in files), files
    for link in re.findall(r"\]\(([^)h#][^)]*)\)", text):
        assert (path.parent / link).exists(), link
