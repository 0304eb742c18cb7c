"""docs/migrating/import_options.md: every option of TRL's GRPOConfig and of NeMo-RL's GRPO examples.

python tools/tables/options_table.py            rewrite the page
python tools/tables/options_table.py --check    exit 1 if the page is not what would be written

Each option is given to tools/import_config, at values that differ from its default and beside the options that it
needs: what changes in the gin file is where it is carried to, what the importer says of it is the difference, and what
it refuses is refused. trl_1_16.json has TRL's options with their defaults, nemo_rl_2026_08.txt the names of NeMo-RL's
keys.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from page_files import write_pages

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "migrating" / "import_options.md"
sys.path.insert(0, str(HERE.parent / "import_config"))

from import_draft import DIFFERS, LEFT, UNKNOWN, Draft  # noqa: E402
from import_nemo_rl import NEMO_RL, from_nemo_rl  # noqa: E402
from import_trl import TRL, from_trl  # noqa: E402
from peer_options import reason  # noqa: E402

Flat = dict[str, Any]
CARRIED, NAMED, REFUSED, LISTED = KINDS = ("carried", "carried, with a difference", "refused", "not carried")


def trl_options() -> Flat:
    """Every field of TRL 1.16's GRPOConfig that TRL itself declares, with its default."""
    return json.loads((HERE / "trl_1_16.json").read_text(encoding="utf-8"))


def nemo_keys() -> list[str]:
    """Every key of NeMo-RL's grpo_math_1B, gdpo_math_1B and dapo examples."""
    return (HERE / "nemo_rl_2026_08.txt").read_text(encoding="utf-8").split()


TRL_BASE: Flat = {"max_steps": 40, "num_generations": 4}
TRL_BESIDE: list[Flat] = [  # what an option may need beside it
    {},
    {"use_vllm": True},
    {"use_vllm": True, "vllm_mode": "server"},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    {"beta": 0.1},
    {"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "scale_rewards": "batch"},
]
TRL_VALUES: dict[str, list[Any]] = {
    "generation_batch_size": [16, 4],
    "steps_per_generation": [2, 1],
    "epsilon_high": [0.28],
    "delta": [1.5, 1.1],
    "importance_sampling_level": ["sequence"],
    "scale_rewards": ["batch", "none"],
    "loss_type": ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "real"],
    "off_policy_mask_threshold": [0.5],
    "vllm_mode": ["server", "colocate"],
    "vllm_server_base_url": ["http://host:1"],
    "vllm_server_host": ["host"],
    "vllm_max_model_length": [64],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate"],
    "vllm_importance_sampling_clip_min": [0.5],
    "vllm_importance_sampling_clip_max": [2.0],
    "vllm_importance_sampling_cap": [2.0],
    "num_generations": [8],
}
NEMO_BASE: Flat = {"grpo.max_num_steps": 40}
LORA = "policy.dtensor_cfg.lora_cfg."
TIS = "loss_fn.truncated_importance_sampling_"
CORRECTED: Flat = {"loss_fn.use_importance_sampling_correction": True, f"{TIS}ratio": 2.0}
VLLM: Flat = {"policy.generation.backend": "vllm"}
SERVED: Flat = VLLM | {"policy.generation.colocated.enabled": False}
NEMO_BESIDE: list[Flat] = [
    {},
    VLLM,
    SERVED,
    CORRECTED,
    CORRECTED | SERVED,
    CORRECTED | SERVED | {"grpo.async_grpo.enabled": True},
    CORRECTED | {f"{TIS}type": "icepop"},
    {"grpo.use_dynamic_sampling": True},
    {"grpo.reward_shaping.enabled": True},
    {"loss_fn.reference_policy_kl_penalty": 0.1},
    {"loss_fn.token_level_loss": False},
    {f"{LORA}enabled": True},
    {f"{LORA}enabled": True, f"{LORA}target_modules": ["k_proj"]},
    {f"{LORA}enabled": True, f"{LORA}match_all_linear": False, f"{LORA}target_modules": ["k_proj"]},
    {"grpo.adv_estimator.name": "reinforce_plus_plus"},
    {"grpo.adv_estimator.normalize_rewards": True},
    {"on_policy_distillation.teacher_model_by_agent_name.all": "a/b"},
]
NEMO_VALUES: dict[str, list[Any]] = {
    "grpo.adv_estimator.name": ["gdpo", "reinforce_plus_plus", "opd", "gae"],
    "grpo.max_num_steps": [50],
    "grpo.max_val_samples": [128, 960],
    "grpo.max_num_epochs": [2],
    "grpo.val_period": [20],
    "grpo.reward_shaping.max_response_length": [256],
    "loss_fn.ratio_clip_c": [3.0],
    "loss_fn.reference_policy_kl_type": ["k1", "k2"],
    f"{TIS}type": ["icepop", "seq-mask-tis"],
    f"{TIS}ratio_min": [0.5],
    "policy.model_name": ["a/b"],
    "policy.precision": ["float16", "float32"],
    "policy.train_global_batch_size": [256],
    "policy.generation.backend": ["vllm", "sglang"],
    "policy.generation.stop_strings": [["x"]],
    "policy.optimizer.name": ["torch.optim.AdamW", "torch.optim.SGD"],
    "policy.optimizer.kwargs.betas": [[0.8, 0.9]],
    "policy.scheduler": [[{"name": "LinearLR", "kwargs": {"total_iters": 50}}, {"name": "CosineAnnealingLR"}]],
    f"{LORA}target_modules": [["q_proj"]],
    "data.dataset_name": ["OpenMathInstruct-2"],
    "data.train.dataset_name": ["OpenMathInstruct-2"],
}
GUESSES: list[Any] = [True, False, 3, 64, 0.5, 2.0]  # of a key whose default is unknown


def other_values(default: Any) -> list[Any]:
    """Values that differ from a default."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [type(default)(default * 2 + 1), default / 2 + 0.25]
    return GUESSES


def bound(draft: Draft) -> dict[str, str]:
    """What a gin file binds and includes."""
    own = {name: str(value) for name, value in (draft.knobs | draft.macros).items()}
    return own | {f"`{name}`": "" for name in draft.includes}


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "#", text)


def differences(name: str, made: Draft, plain: Draft) -> Iterator[str]:
    """What an import says because of an option: notes that carry its name, or that are not there without it."""
    known = {(key, without_numbers(text)) for _, key, text in plain.notes}
    for kind, key, text in made.notes:
        assert kind != UNKNOWN, key
        if kind not in (DIFFERS, LEFT) or " = " in key:  # an option that is left out, with its value
            continue
        own = key in (name, name.rpartition(".")[2])
        if own or (key, without_numbers(text)) not in known:
            yield text if own else f"{key}: {text}"


def row(
    name: str, build: Callable[[Flat], Draft], values: list[Any], contexts: list[Flat], why: str | None
) -> list[str]:
    """An option's line: what becomes of it, where it goes, and what is said."""
    knobs: dict[str, None] = {}
    said: dict[str, str] = {}
    refused: dict[str, None] = {}
    for beside in contexts:
        try:
            plain = build(beside)
        except ValueError:
            continue
        for value in values:
            try:
                made = build({**beside, name: value})
            except ValueError as error:
                if name in str(error).split(":")[0] and not re.search(r"wanted (bool|int|float|str|list)", str(error)):
                    refused[str(error)] = None
                continue
            before, after = bound(plain), bound(made)
            changed = [knob for knob in after | before if after.get(knob) != before.get(knob)]
            changed.sort(key=lambda knob: "@" not in after.get(knob, ""))  # what chooses a function, then its knobs
            knobs |= dict.fromkeys(changed)
            if changed or not why:
                said |= {without_numbers(text): text for text in differences(name, made, plain)}
    own = [knob if knob.startswith("`") else f"`{knob}`" for knob in knobs]
    if not own and not said:
        if not (why or refused):
            raise ValueError(f"{name}: got no effect and no reason, wanted one of them")
        return [REFUSED, "", next(iter(refused))] if refused else [LISTED, "", why or ""]
    shown = own[:4] + ([f"and {len(own) - 4} more"] if len(own) > 4 else [])
    return [NAMED if said else CARRIED, ", ".join(shown), "; ".join(list(said.values())[:3])]


def tables() -> Iterator[str]:
    """The page."""
    trl_rows = {
        name: row(
            name,
            lambda flat: from_trl(TRL_BASE | flat, 1, 7473),
            TRL_VALUES.get(name, other_values(default)),
            TRL_BESIDE,
            reason(TRL, name),
        )
        for name, default in trl_options().items()
    }
    nemo_rows = {
        name: row(
            name,
            lambda flat: from_nemo_rl(NEMO_BASE | flat, 100),
            NEMO_VALUES.get(name, GUESSES),
            NEMO_BESIDE,
            reason(NEMO_RL, name),
        )
        for name in nemo_keys()
    }
    yield from HEAD
    for title, rows in (("TRL 1.16: GRPOConfig", trl_rows), ("NeMo-RL, August 2026", nemo_rows)):
        counts = {kind: sum(cells[0] == kind for cells in rows.values()) for kind in KINDS}
        yield f"## {title}"
        yield ""
        yield f"{len(rows)} options: {', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}."
        yield ""
        yield "| option | | here | what is said |"
        yield "|---|---|---|---|"
        for name, cells in rows.items():
            yield f"| `{name}` | " + " | ".join(cell.replace("|", " ").replace("\n", " ") for cell in cells) + " |"
        yield ""


HEAD = [
    "# Every option that is imported",
    "",
    "What `tools/import_config` makes of every option of TRL 1.16's GRPOConfig and of every key of NeMo-RL's",
    "grpo_math_1B.yaml, gdpo_math_1B.yaml and dapo recipes (commit 7ea279a), as the importer itself answers when it is",
    "asked: `python tools/tables/options_table.py` writes this page.",
    "",
    "- **carried**: it binds the knobs that are named here. **With a difference**: an import that has it says so.",
    "- **refused**: this value, or a value, ends the import with the reason.",
    "- **not carried**: every import that has it lists it with the reason.",
    "",
    "[From TRL](from_trl.md) and [from NeMo-RL](from_nemo_rl.md) say the same in words, with the fields that TRL",
    "inherits from transformers; `experiments/trl_conformance` compares gradients.",
    "",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or say that it is not what would be written."""
    return write_pages("options_table", __doc__, lambda: {PAGE: "\n".join(tables()).rstrip() + "\n"}, argv)


if __name__ == "__main__":
    sys.exit(main())
