"""Gradients of TRL's GRPOTrainer against ours, for every configuration of compare_trl_cases.py, and the table of it.

python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out experiments/trl_conformance/README.md

TRL runs in an environment of its own (tools/bench/trl.requirements.txt): its own trainer, from data loader to backward,
on given samples, a model of a few thousand parameters in float64. Each of its optimizer steps on one rollout is
compared with what tools/import_config makes of the same configuration, parameter by parameter. A configuration is
`equal`; `refused` by the importer; `named`, where the gradient differs, a note of the importer says so, and TRL's form
of what the note names makes it equal; or `silent`. --theirs keeps TRL's gradients in a file, and reads them from it
where it is there. Exit codes: 0 none is silent, 1 one is, 2 bad input.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

BOUND = 1e-5  # |ours - TRL's| / |TRL's| of a gradient: TRL's advantages and the model's norms are float32
DEADLINE = 3600.0  # seconds for TRL's side
PROMPTS, GROUP, LONGEST, FIRST = 8, 4, 8, 100  # FIRST: the token that opens row 0; each row has its own


class Result(NamedTuple):
    """How a configuration came out."""

    name: str
    outcome: str  # equal, named, refused, silent
    said: str  # what was refused or named
    apart: float | None  # of the gradients, as imported
    left: float | None  # with the named differences undone


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl_python", type=Path, required=True, metavar="FILE", help="python of TRL's environment")
    parser.add_argument("--theirs", type=Path, metavar="FILE", help="TRL's gradients, made when they are not there")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name has this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the page; returns the exit code."""
    args = flags().parse_args(argv)
    if not args.trl_python.exists():
        print(f"error: --trl_python: got {args.trl_python}, wanted the python of TRL's environment", file=sys.stderr)
        return 2
    results, versions = compared(args.trl_python, args.only, args.theirs)
    if not results:
        print(f"error: --only: got {args.only!r}, wanted text of a configuration's name", file=sys.stderr)
        return 2
    page = "\n".join(written(results, versions))
    if args.out is None:
        print(page)
    else:
        args.out.write_text(page + "\n", encoding="utf-8")
    silent = [result for result in results if result.outcome == "silent"]
    for result in silent:
        print(f"silent: {result.name}: {result.apart:.1e}, {result.left:.1e}; {result.said}", file=sys.stderr)
    return 1 if silent else 0


def compared(trl_python: Path, only: str, kept: Path | None) -> tuple[list[Result], dict[str, str]]:
    """Both sides of every configuration with `only` in its name, and the versions of TRL's environment."""
    import torch
    from compare_trl_cases import cases

    torch.set_num_threads(1)  # a model of a few thousand parameters
    chosen = [case for case in cases() if only in case.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, shared = samples(folder)
        drafts = {case.name: draft_of(case.config) for case in chosen}
        carried = [case for case in chosen if not isinstance(drafts[case.name], str)]
        theirs = trl_gradients(trl_python, carried, shared, folder, kept)
        results = [
            judged(case, drafts[case.name], theirs["cases"].get(case.name), shared, model, folder) for case in chosen
        ]
    return results, theirs["versions"]


def trl_gradients(
    trl_python: Path, chosen: Sequence[Any], shared: dict[str, Any], folder: Path, kept: Path | None
) -> dict[str, Any]:
    """What TRL's side found, by the configuration's name; of what is kept in the file, only the rest is made."""
    import torch

    found: dict[str, Any] = {"cases": {}, "versions": {}}
    if kept is not None and kept.exists():
        found = torch.load(kept, weights_only=False)
    missing = [case for case in chosen if case.name not in found["cases"]]
    if not missing:
        return found
    given = [{"config": steps_of(case.config), "unscored": case.unscored} for case in missing]
    torch.save(shared | {"cases": given}, folder / "work.pt")
    side = Path(__file__).with_name("compare_trl_side.py")
    command = [str(trl_python), str(side), str(folder / "work.pt"), str(folder / "out.pt")]
    with open(folder / "said", "w+") as said:
        done = subprocess.run(command, stdout=said, stderr=said, timeout=DEADLINE, check=False)
        said.seek(0)
        if done.returncode:
            raise SystemExit(f"TRL's side ended with {done.returncode}: {said.read()[-2000:]}")
    made = torch.load(folder / "out.pt", weights_only=False)
    names = [case.name for case in missing]
    found = {
        "cases": found["cases"] | dict(zip(names, made["cases"], strict=True)),
        "versions": made["versions"],
    }
    if kept is not None:
        torch.save(found, kept)
    return found


def steps_of(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, ending when one rollout has been learned from."""
    device, accumulate = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    rows = config.get("generation_batch_size", device * config.get("steps_per_generation", accumulate))
    updates = max(1, rows // (device * accumulate)) * config.get("num_iterations", 1)
    return config | {"max_steps": updates}


def draft_of(config: dict[str, Any]) -> Any:
    """What the importer makes of it, or why it refuses."""
    from import_trl import from_trl

    try:
        return from_trl(steps_of(config), 1, None)
    except ValueError as error:
        return str(error)


def samples(folder: Path) -> tuple[Any, dict[str, Any]]:
    """A small model in float64, and rows of every length with another engine's log-probs and rewards."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_fn.shell.model import hf, tiny_model

    draw = torch.Generator().manual_seed(0)
    tokenizer = tiny_model.byte_tokenizer(chat=False)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=259,
        **{"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.3},
        **{"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id},
    )
    model = Qwen2ForCausalLM(config).double().eval()
    hf.export(model, tokenizer, folder / "model")
    prompts = [f"p{number}:" for number in range(PROMPTS)]
    asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    rows, width = [], len(asked[0]) + LONGEST
    tokens = torch.full((PROMPTS * GROUP, width), tokenizer.eos_token_id)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for b in range(PROMPTS * GROUP):
        length = 2 + b * 5 % (LONGEST - 1)
        ids = [FIRST + b, *torch.randint(0, 256, (length - 1,), generator=draw).tolist()]
        ids = ids if length == LONGEST and b % 3 else [*ids[:-1], tokenizer.eos_token_id]
        rows.append({"completion": ids})
        start = len(asked[0])
        tokens[b, :start], tokens[b, start : start + length] = torch.tensor(asked[b // GROUP]), torch.tensor(ids)
        mask[b, start : start + length] = True
    logps = engine_logps(model, tokens, mask, draw)
    for b, row in enumerate(rows):
        row["logps"] = logps[b][mask[b]].tolist()
    rewards = [round(float(x), 3) for x in torch.rand(len(rows), generator=draw)]
    rewards[:GROUP] = [1.0, 0.0, 0.0, 1.0]
    rewards[GROUP : 2 * GROUP] = [0.5] * GROUP  # nothing to learn from
    reference = {name: p + 0.05 * torch.randn(p.shape, generator=draw) for name, p in model.state_dict().items()}
    reference["lm_head.weight"] = reference["model.embed_tokens.weight"]
    return model, {
        **{"model": str(folder / "model"), "prompts": prompts, "prompt_ids": asked, "rows": rows},
        **{"first_token": FIRST, "tokens": tokens, "mask": mask, "logps": logps, "rewards": rewards},
        "rewards_with_none": [None if b % 5 == 2 else value for b, value in enumerate(rewards)],
        "truncated": torch.tensor([row["completion"][-1] != tokenizer.eos_token_id for row in rows]),
        "reference": {name: p.detach() for name, p in reference.items()},
    }


def engine_logps(model: Any, tokens: Any, mask: Any, draw: Any) -> Any:
    """Log-probs as another engine may have had them: some tenths of a nat away, and of float32."""
    import torch

    from grpo_fn.shell.policy.functional import FunctionalPolicy

    policy = FunctionalPolicy(model, temperature=1.0)
    with torch.no_grad():
        exact = policy.scores(policy.params, tokens, mask).logp
    noise = 0.2 * torch.randn(exact.shape, generator=draw, dtype=torch.float64)
    return (exact + noise).clamp(max=-1e-3).float().double()


def judged(case: Any, draft: Any, theirs: Any, shared: dict[str, Any], model: Any, folder: Path) -> Result:
    """How a configuration comes out."""
    from compare_trl_ours import called_for, distance, gradients, imported

    if isinstance(draft, str):
        return Result(case.name, "refused", draft, None, None)
    if "error" in theirs:
        return Result(case.name, "refused there", theirs["error"], None, None)
    made, repairs, updates = imported(case, draft, shared, model, folder), called_for(draft), theirs["updates"]

    def furthest(chosen: set[str]) -> float:
        pairs = zip(gradients(made, updates, chosen), updates, strict=True)
        return max(distance(found, update["grads"]) for found, update in pairs)

    split = len(updates) != made.updates  # another number of optimizer steps: no gradient to compare as imported
    apart = float("inf") if split else furthest(set())
    if apart <= BOUND:
        return Result(case.name, "equal", "", apart, None)
    left = furthest(repairs)
    named = left <= BOUND and (not split or "split groups" in repairs)
    acting = {name for name in repairs if not named or furthest(repairs - {name}) > BOUND}
    acting = sorted(acting | ({"split groups"} & repairs))
    return Result(case.name, "named" if named else "silent", ", ".join(acting), apart, left)


def written(results: Sequence[Result], versions: dict[str, str]) -> list[str]:
    """The page's lines."""
    from importlib.metadata import version

    from compare_trl_cases import BASE
    from compare_trl_ours import REPAIRS

    counts = {kind: sum(result.outcome == kind for result in results) for kind in OUTCOMES}
    ours = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    same = [value for result in results for value in (result.apart, result.left) if value and value <= BOUND]
    other = [value for result in results for value in (result.apart, result.left) if value and value > BOUND]
    acting = {name: sum(name in result.said.split(", ") for result in results) for name in REPAIRS}
    return [
        *HEAD,
        f"**Result.** {datetime.now(UTC):%Y-%m-%d}; TRL's side: "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}; ours: {ours}; CPU, float64. "
        f"{len(results)} configurations. A gradient counts as equal within {BOUND:g} of its norm, since TRL's "
        "advantages and the model's norms are float32: those that are equal are at most "
        f"{max(same, default=0.0):.1e} apart, those that are not at least {min(other, default=float('inf')):.1e}.",
        "",
        "| outcome | configurations | what it is |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {what} |" for kind, what in OUTCOMES.items()),
        "",
        "What was named, and in how many configurations TRL's form of it was needed for an equal gradient:",
        "",
        "| named | configurations | words of the importer |",
        "|---|---|---|",
        *(f"| {name} | {acting[name]} | {words} |" for name, words in REPAIRS.items()),
        "",
        f"The base: {', '.join(f'`{key}={value!r}`' for key, value in BASE.items())}.",
        "",
        "| configuration: what differs from the base | outcome | apart | named undone | what was named or refused |",
        "|---|---|---|---|---|",
        *(
            f"| {result.name} | {result.outcome} | {figure(result.apart)} | {figure(result.left)} | "
            f"{result.said.replace('|', ' ')} |"
            for result in results
        ),
    ]


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value < float("inf") else "other updates"


OUTCOMES = {
    "equal": "the same gradient, as imported",
    "named": "another gradient; the importer says so, and TRL's form of what it names makes it equal",
    "refused": "the importer says why it cannot carry it",
    "refused there": "TRL itself refuses it",
    "silent": "another gradient that no note accounts for",
}
HEAD = [
    "# TRL's own loss against ours, configuration by configuration",
    "",
    "**Claim.** What `tools/import_config` makes of a GRPOConfig of TRL 1.16 has the gradient of TRL's",
    "GRPOTrainer, or the importer refuses it, or says what differs. None differs silently.",
    "",
    "A rollout's samples, rewards and log-probs are given; TRL's trainer makes all of its optimizer steps on it.",
    "Before each one, its parameters and gradients are taken, and ours is computed at the same parameters. Where the",
    "two differ, TRL's form of each part that a note of the import names is put in the place of ours: only if that",
    "makes them equal is the difference a named one.",
    "",
    "**Command.** `python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out "
    "experiments/trl_conformance/README.md`,",
    "which writes this page; TRL's environment is made from tools/bench/trl.requirements.txt.",
    "",
]

if __name__ == "__main__":
    sys.exit(main())
