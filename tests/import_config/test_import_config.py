"""`grpo_fn import`: what it writes can be launched, what it cannot carry is listed, and bad input is said."""

import json
import re
import tempfile
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from e2e.running import TESTS
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import run
from grpo_fn.algo.step import Algorithm
from grpo_fn.config import freeze, load_config
from grpo_fn.import_config import __main__ as tool
from grpo_fn.import_config import draft, from_nemo_rl, from_trl, peer_file
from grpo_fn.import_config.draft import Draft, Option
from grpo_fn.shell.model import tiny
from grpo_fn.trainer.validate import check_sampler_logp

CONFIGS = TESTS / "import_config" / "configs"
SAMPLES = {"nemo_rl.yaml": [], "trl.yaml": ["--world", "2"], "trl.py": ["--world", "2", "--rows", "7473"]}


@pytest.fixture(scope="module")
def given_params(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and rows for the file that was written."""
    folder = tmp_path_factory.mktemp("import")
    shape = tiny.Qwen2Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=1024)
    tiny.make_random(shape, folder / "model", seed=0, chat=False)
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"MODEL": folder / "model", "DATA": folder / "rows.jsonl", "rows.hold_out.test_size": 2}
    values |= {"sections.Evaluation.problems": 2}
    return [f"{name}={value}" for name, value in values.items()]


def written(name: str, folder: Path) -> Path:
    assert tool.main([str(CONFIGS / name), *SAMPLES[name], "--out", str(folder / "made.gin")]) == 0
    return folder / "made.gin"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_dry_run_of_a_translated_file_shows_its_rows_and_updates(
    name: str, given_params: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = written(name, tmp_path)
    notes = capsys.readouterr().err.strip().splitlines()
    unknown = [line for line in notes if line.startswith("unknown: ")]
    assert len(unknown) == {"nemo_rl.yaml": 2, "trl.yaml": 0, "trl.py": 1}[name]
    assert all("made_up" in line for line in unknown)
    assert [f"# {line}" for line in notes] == made.read_text().splitlines()[1 : 1 + len(notes)]
    params = [part for param in given_params for part in ("--gin_param", param)]
    assert run.main(["--gin_file", str(made), *params, "--dry_run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    rows = {"nemo_rl.yaml": "32 prompts x 16 samples = 512", "trl.yaml": "16 prompts x 8", "trl.py": "8 prompts x 8"}
    assert rows[name] in said
    updates = {"nemo_rl.yaml": "2 a step, 1000 in all", "trl.yaml": "8 a step, 400 in all", "trl.py": "1 a step, 2803"}
    assert updates[name] in said


# -- any configuration

TABLES = {"trl": from_trl.TRL, "nemo_rl": from_nemo_rl.NEMO_RL}
BASES = {"trl": {"max_steps": 40, "num_generations": 4}, "nemo_rl": {"grpo.max_num_steps": 7}}
OWN = {  # where what a table says of an option is not enough
    **{"per_device_train_batch_size": [1, 2, 4, 8], "gradient_accumulation_steps": [1, 2, 4, 8]},
    **{"generation_batch_size": [None, 16, 32, 48], "policy.train_global_batch_size": [None, 16, 32, 48]},
    **{"max_steps": [1, 500], "num_generations": [2, 4, 8], "delta": [None, 1.5, 0.5]},
    **{"epsilon_high": [None, 0.28, 5.0], "scale_rewards": ["group", "batch", "none", "mean", True, False]},
    "fsdp": ["", "full_shard auto_wrap", "shard_grad_op offload", ["no_shard"], True],
    "lora_target_modules": [["q_proj"], "all-linear"],
    "vllm_importance_sampling_clip_max": [None, 2.0, 5.0],
    **{"grpo.max_num_steps": [1, 500], "grpo.max_num_epochs": [2], "policy.optimizer.name": ["torch.optim.AdamW"]},
    **{"policy.optimizer.kwargs.betas": [[0.9, 0.999], [0.9], [2, 0.5]], "policy.scheduler": [[]]},
    "policy.dtensor_cfg.lora_cfg.target_modules": [[], ["q_proj"]],
    "policy.generation.stop_strings": [["</s>"], ["@losses.cispo", "%STEPS", "a\nb"]],
    "policy.generation.max_new_tokens": [8, "${policy.max_total_sequence_length}", "${policy.gone}"],
    "policy.generation.backend": ["vllm", "vllm", "sglang"],
    "loss_fn.truncated_importance_sampling_ratio": [2.0, 1.002, 0.5],
}
VALUES = {bool: [True, False], int: [1, 2, 8, 16, 64], str: ["a/b", "@math.correct", "%X", "it's"]}
NUMBERS = [0, 1, 2, 0.1, 0.5, 1.5, 5.0, 1e-6, "1e-6", -1, 1e300, float("nan"), float("inf"), 10**400]
JUNK = st.one_of(st.sampled_from([*NUMBERS, None, True, False, [], {}, {"a": 1}]), st.text(max_size=3))


def usual(name: str, option: Option) -> st.SearchStrategy[Any]:
    """Values of an option, most of which are taken."""
    if name in OWN:
        return st.sampled_from(OWN[name])
    if option.known:
        return st.sampled_from([*option.known, "odd"] if str in option.types else [True, False])
    if float in option.types:
        return st.sampled_from([1.0, 0.5, 0.05, option.default, 2, "1e-6", -0.5])
    return st.sampled_from([*VALUES[option.types[0]], option.default])


def configurations(peer: str, most: int, values: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some options of a peer with values, and what a run cannot be without."""
    options = TABLES[peer].options
    names = st.lists(st.sampled_from([*options]), unique=True, max_size=most)
    found = names.flatmap(lambda chosen: st.fixed_dictionaries({name: values(name, options[name]) for name in chosen}))
    return found.map(lambda config: BASES[peer] | config)


def carried(peer: str, config: dict[str, Any], rows: int | None = 7473) -> Draft | str:
    """The draft, or what is said instead."""
    try:
        return from_trl.from_trl(config, 2, rows) if peer == "trl" else from_nemo_rl.from_nemo_rl(config, None)
    except ValueError as error:
        return str(error)


def launched(made: Draft, folder: Path) -> tuple[Algorithm, Any]:
    """The algorithm and the steps of the file that is written; that it would be launched is checked."""
    path = folder / "made.gin"
    path.write_text(made.text("x"), encoding="utf-8")
    macros = [f"{macro}=m" for macro in ("MODEL", "DATA") if macro not in made.macros]
    knobs = load_config([str(path)], macros).root.knobs
    algorithm = freeze(knobs["algorithm"], {})
    check_sampler_logp(algorithm, knobs["sampling"].knobs["max_staleness"])
    return algorithm, knobs["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("peer", TABLES)
@given(st.data())
def test_a_configuration_of_known_keys_can_be_launched_or_says_why_not(peer: str, data: st.DataObject) -> None:
    config = data.draw(configurations(peer, 10, usual))
    made = carried(peer, config, None)
    if isinstance(made, str):
        assert "got" in made, made
        assert "expected" in made, made
        return
    with tempfile.TemporaryDirectory() as folder:
        algorithm, steps = launched(made, Path(folder))
    if peer == "nemo_rl":
        shape = (config.get("grpo.num_prompts_per_step", 32), config.get("grpo.num_generations_per_prompt", 16))
        assert (algorithm.prompts, algorithm.group_size) == shape
        assert steps == config["grpo.max_num_steps"]
    else:
        update = config.get("per_device_train_batch_size", 8) * 2 * config.get("gradient_accumulation_steps", 1)
        rows = algorithm.prompts * algorithm.group_size / algorithm.minibatches
        assert rows == update or any("would split groups" in said for _, _, said in made.notes)
        assert algorithm.prompts % algorithm.minibatches == 0


@pytest.mark.parametrize("peer", TABLES)
@given(st.data())
def test_whatever_stands_there_is_carried_listed_or_refused(peer: str, data: st.DataObject) -> None:
    keys = st.text(st.characters(exclude_characters="."), min_size=1, max_size=6)
    strange = data.draw(st.dictionaries(keys.map("zz{}".format), JUNK, max_size=2))
    made = carried(peer, strange | data.draw(configurations(peer, 2, lambda name, option: JUNK)))
    if isinstance(made, str):
        assert "got" in made, made
        assert "expected" in made, made
        return
    text = made.text("x")
    text.encode("utf-8")
    comments = text.split("from __gin__ import dynamic_registration\n")[0].splitlines()
    assert all(line.startswith("# ") for line in comments)  # nothing of the original gets out of its comment
    for key in strange:
        shown = draft.comment_text(f"# unknown: {key}")
        assert any(line.startswith(shown) for line in comments), (key, text)


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
    made = from_trl.from_trl(config | {"steps_per_generation": rounds, "num_generations": group}, world, None)
    found = tuple(made.knobs[f"step.Algorithm.{name}"] for name in ("prompts", "minibatches"))
    assert found == ARITHMETIC[case]


# -- every rule

IMPORTS = [
    (peer, peer_file.lay_over(first, (more or [{}])[0]), parts)
    for peer, cases in yaml.safe_load((CONFIGS / "imports.yaml").read_text()).items()
    for first, *more, parts in cases
]


@pytest.mark.parametrize(("peer", "config", "parts"), IMPORTS)
def test_an_option_is_carried_named_or_refused(
    peer: str, config: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    made = carried(peer, BASES[peer] | config)
    if isinstance(made, Draft):
        launched(made, tmp_path)
    text, plain = (x if isinstance(x, str) else x.text("x") for x in (made, carried(peer, BASES[peer])))
    text = f"error: {text}" if isinstance(made, str) else text
    assert [part for part in parts if (part.removeprefix("not ") in text) == part.startswith("not ")] == [], text
    assert not config or any((part in text) != (part in plain) for part in parts) or text == plain


def test_every_option_of_trl_1_16_is_known() -> None:
    """The 79 fields that TRL's GRPOConfig itself declares, with their defaults."""
    fields = json.loads((CONFIGS / "trl_1_16.json").read_text())
    assert len(fields) == 79
    made = from_trl.from_trl(BASES["trl"] | fields, 2, 7473)
    assert not [key for kind, key, _ in made.notes if kind == draft.UNKNOWN]


def test_every_key_of_nemo_rls_examples_is_known() -> None:
    """Every key of its grpo_math_1B, gdpo_math_1B and dapo examples."""
    keys = (CONFIGS / "nemo_rl_2026_08.txt").read_text().split()
    assert len(keys) > 350
    rows = from_nemo_rl.NEMO_RL
    assert not [key for key in keys if key not in rows.options and rows.reason(key) is None]


def test_epochs_of_nemo_rl_end_a_run_where_the_rows_are_known() -> None:
    config = {"grpo.max_num_steps": 1000000, "grpo.max_num_epochs": 2, "grpo.num_prompts_per_step": 32}
    assert from_nemo_rl.from_nemo_rl(config, 100).macros["STEPS"] == 7


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
    expected = [
        "STEPS = 5",
        "prompts = 8",
        "adamw.lr = 2e-05",
        "adamw.eps = 1e-08",
        "clip_low = 0.1",
        "clip_high = 0.3",
    ]
    assert [part for part in expected if part not in text] == []
    capsys.readouterr()
    (tmp_path / "base.yaml").write_text("defaults: sub/own.yaml\ngrpo: {}\n")
    assert tool.main([str(tmp_path / "sub" / "own.yaml")]) == 2
    assert "got defaults that lead back to it, expected files below one another" in capsys.readouterr().err
    (tmp_path / "base.yaml").unlink()
    assert tool.main([str(tmp_path / "sub" / "own.yaml")]) == 2
    assert "base.yaml, which cannot be read" in capsys.readouterr().err


def test_a_reference_may_be_relative() -> None:
    config = {"a": {"b": {"x": 1, "y": "${.x}", "z": "${..c}", "far": "${.y}"}, "c": "${mul:${.b.x}, 3}"}}
    found = peer_file.fill_references(config)
    assert found == {"a.b.x": 1, "a.b.y": 1, "a.b.z": 3, "a.b.far": 1, "a.c": 3}
    with pytest.raises(ValueError, match=r"got \$\{\.no\} at a\.b, expected a key of the file"):
        peer_file.fill_references({"a": {"b": "${.no}"}})


# -- bad files

BAD = {
    "not there": (None, ["cannot be read", "expected a configuration"]),
    "no mapping": ("[1, 2]", ["got list", "expected keys and values"]),
    "broken": ("{a: [", ["expected JSON, YAML or Python literals"]),
    "of verl": ("actor_rollout_ref: {actor: {}}", ["got a configuration of verl", "migrating.md"]),
    "of TRL's distillation": (
        "{learning_rate: 1e-6, teacher_model_name_or_path: a}",
        ["got teacher_model_name_or_path", "expected a GRPOConfig; algo/opd.gin and algo/iw_opd.gin"],
    ),
    "of NeMo-RL's distillation": (
        "{distillation: {max_num_steps: 1}, policy: {model_name: a}}",
        ["distillation: got NeMo-RL's distillation of a teacher's top logits", "expected its GRPO"],
    ),
    "of something else": ("layers: 12", ["got the keys layers", "expected `grpo`"]),
    "no steps": ("learning_rate: 1e-6", ["got none", "expected --rows"]),
    "round in circles": ("grpo: {max_num_steps: '${grpo.max_num_steps}'}", ["refers to itself"]),
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


def test_a_configuration_means_the_same_in_every_form_and_python_is_never_run(tmp_path: Path) -> None:
    config = {"num_generations": 4, "max_steps": 3, "loss_type": "dr_grpo", "bf16": False}
    call = "a = GRPOConfig(" + ", ".join(f"{k}={v!r}" for k, v in config.items()) + ")"
    for name, text in (("a.json", json.dumps(config)), ("b.py", repr(config)), ("c.py", call)):
        (tmp_path / name).write_text(text)
        assert peer_file.read(tmp_path / name) == config
    (tmp_path / "d.py").write_text(f"GRPOConfig(seed=open({str(tmp_path / 'ran')!r}, 'w'))")
    assert tool.main([str(tmp_path / "d.py")]) == 2
    assert not (tmp_path / "ran").exists()


# -- the pages

PAGES = [TESTS.parent / "docs" / "migrating.md"]
PACKAGES = [f"grpo_fn.{name}" for name in ("algo", "rewards", "tasks", "trainer", "core", "shell.logging")]
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
