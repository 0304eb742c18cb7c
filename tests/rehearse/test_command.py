"""`python -m grpo_fn.run --rehearse`: a table, an exit code, and one line for what cannot be rehearsed."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config

from grpo_fn import run
from grpo_fn.rehearse import command
from grpo_fn.rehearse.cards import CARDS, Assumptions
from grpo_fn.rehearse.changes import (
    BLOCKS_COMPILED,
    HEAD,
    JOINED,
    SPLIT_KV,
    STEPS_COMPILED,
    changes,
    work_as_compiled,
)
from grpo_fn.rehearse.figures import figures as figures_of
from grpo_fn.rehearse.rehearsal import Rehearsal
from grpo_fn.rehearse.table import size
from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.attention import attention_note

BINDINGS = ["sections.Sampling.max_new_tokens=24", "sections.PolicyUpdate.micro_tokens=512"]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _alone() -> None:
    if dist.is_initialized():  # by a test before: of one rank alone, which nothing uses any more
        dist.destroy_process_group()


def folder(path: Path, **changed: int) -> Path:
    """A folder with config.json alone."""
    known = {"vocab_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": True, **SMALL, **changed}
    Qwen2Config(**known, max_position_embeddings=512).save_pretrained(path)
    return path


def rehearsed(path: Path, *more: str, files: tuple[str, ...] = ("scale/bf16.gin", "scale/full_shard.gin")) -> int:
    """The exit code of a rehearsal of the arithmetic run with that model."""
    bound = [f"train.train.model='{path}'", *BINDINGS]
    given = [word for name in ("run/arithmetic.gin", *files) for word in ("--gin_file", name)]
    return run.main([*given, *(word for one in bound for word in ("--gin_param", one)), "--rehearse", *more])


@pytest.fixture
def small_blocks_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are rehearsed as larger ones are."""
    monkeypatch.setattr(blocks, "SMALL_BLOCK", 0)


@pytest.mark.usefixtures("small_blocks_compile")
def test_a_table_of_memory_work_collectives_and_time(tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "figures", lambda *given: (seen.append(given[0]), figures_of(*given))[1])
    assert rehearsed(folder(tmp_path / "m"), "--ranks", "8", "--json", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert said.startswith("fits: ")
    for what in (
        "memory of one of 8 ranks",
        "work of a step",
        "collectives of a step",
        "not measured",
        "assumed",
        "of the bfloat16 peak",
        attention_note("sdpa", torch.bfloat16, None)[0],
    ):
        assert what in said
    figures = json.loads((tmp_path / "out.json").read_text())
    memory = {one["phase"]: one for one in figures["memory"]}
    assert set(memory) == {"load", "generate", "train", "update", "sync"}
    assert all(sum(one["holders"].values()) == one["bytes"] for one in memory.values())
    assert figures["peak"] == max(one["bytes"] for one in memory.values())
    assert {one["ranks"] for one in figures["traffic"] if one["piece"] == "micro-batch"} <= {8}
    step = sum(one["times"] * one["seconds"] for one in figures["pieces"])
    assert figures["seconds"] == pytest.approx(step)
    assert step > 0
    assert {one["piece"] for one in figures["pieces"]} >= {"read prompts", "decode a token", "update", "sync"}
    assert all(one["kernels"] > 0 for one in figures["pieces"])
    assert figures["waits"]["decode a token"] == seen[0].decoding.looks == 3
    check_changes(seen[0], figures, said)


def check_changes(counted: Rehearsal, figures: dict, said: str) -> None:
    """Each of the five is printed and gives something; what a step does with a change is part of what it does."""
    work = work_as_compiled(counted.mode, counted.compiled)
    made = {one.name: one for one in changes(counted.mode, counted.compiled, "decode a token", counted.repeats)}
    assert list(made) == [HEAD, SPLIT_KV, JOINED, BLOCKS_COMPILED, STEPS_COMPILED]
    for one in made.values():
        assert one.used <= work, one.name
        assert any(line.strip().startswith(one.name) for line in said.splitlines())
    for one in figures["changes"]:
        assert one["seconds_without_both"] < figures["seconds"] < one["seconds_without"], one["name"]
        assert one["launches"] < one["launches_without"], one["name"]
        if one["name"] in (HEAD, BLOCKS_COMPILED, STEPS_COMPILED):
            assert one["bytes"] < one["bytes_without"], one["name"]
    for name in (SPLIT_KV, JOINED):  # what is the same with and without is in neither
        assert not made[name].used & made[name].without, name
    attends = [one for one in figures["parts"] if (one["piece"], one["kind"]) == ("decode a token", "attention")]
    kernels = next(one for one in figures["changes"] if one["name"] == SPLIT_KV)
    assert kernels["bytes"] == sum(one["bytes"] for one in attends)
    assert kernels["launches"] == sum(one["launches"] for one in attends)
    assert {one.cost.kind for one in made[SPLIT_KV].used} == {"attention"}
    joined = {one.cost.kind for one in made[JOINED].used}
    assert "products" in joined
    assert "attention" not in joined
    assert not made[BLOCKS_COMPILED].used <= counted.mode.work  # chains stand in the place of operators


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_no_assumed_figure_is_printed_as_one_of_a_data_sheet(card):
    """Every figure of a card is on one of two lines; on that of data sheets only one that a page is named for."""
    texts, (quoted, ours, *more) = card.texts(), Assumptions().lines(card)
    assert "quoted from data sheets" in quoted
    assert "assumed, from no data sheet" in ours
    figures = {f.name for f in fields(card) if f.type in ("float", "int", float, int)}
    assert set(texts) == figures
    assert set(card.quoted) <= figures - {"network", "host_link", "memory"}
    assert ("half" in card.quoted, "link" in card.quoted) == (card.name != "RTX 3070 8 GB",) * 2
    for name, text in texts.items():
        assert (text in quoted, text in ours) == (name in card.quoted, name not in card.quoted), name
    assert all("data sheet" not in line and "assumed" in line for line in more)


def test_every_figure_of_the_page_is_that_of_the_code():
    page = (Path(__file__).parents[2] / "docs/running/rehearsal.md").read_text()
    for name, card in CARDS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        values = (card.half / 1e12, card.single / 1e12, card.bandwidth / 1e12, card.link / 1e9)
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        for figure, value, cell in zip(("half", "single", "bandwidth", "link"), values, cells[1:5], strict=True):
            source = card.quoted.get(figure, "assumed")
            assert cell.split()[0] == f"{value:g}", (name, figure)
            assert ("assumed" in cell) is (source == "assumed"), (name, figure)
            assert source == "assumed" or source in cells[5], (name, figure)


def test_what_does_not_fit_is_said_with_the_phase_and_what_holds_it(tmp_path, capsys):
    path = folder(tmp_path / "m", hidden_size=1024, vocab_size=400_000, num_hidden_layers=1)
    assert rehearsed(path, "--card", "8gb") == 3
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("does not fit: ")
    assert "'train'" in first
    assert "RTX 3070" in first
    assert "GB too many; the largest: " in second


def test_small_blocks_are_said_to_run_as_written(tmp_path, capsys):
    assert rehearsed(folder(tmp_path / "m")) == 0
    out = capsys.readouterr().out
    assert "blocks run as written, not compiled as is the default on CUDA: a block has " in out
    assert BLOCKS_COMPILED not in out
    assert STEPS_COMPILED not in out


@pytest.mark.usefixtures("small_blocks_compile")
def test_blocks_are_rehearsed_as_written_and_it_is_said_where_a_card_has_them_compiled(tmp_path, capsys):
    path, counted = folder(tmp_path / "m"), "compiled blocks: activations are counted as written"
    for more, said in [
        ((), ("blocks are compiled, the default on CUDA", counted)),
        (("--gin_param", "mesh.Parallelism.compile=@blocks.torch_compile"), (counted,)),
        (("--gin_param", "sections.Compute.deterministic=True"), ("sections.Compute.deterministic is True",)),
        (("--gin_param", "mesh.Parallelism.compile=@blocks.eager"), ()),
    ]:
        assert rehearsed(path, *more) == 0
        out = capsys.readouterr().out
        assert all(line in out for line in said), more
        assert (counted in out) is (counted in said), more


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "flash_attention_3"])
def test_an_attention_of_a_card_is_rehearsed_and_it_is_said_what_was_counted(name, tmp_path, capsys):
    """On a machine that has neither the card nor the package."""
    path = folder(tmp_path / "m", num_hidden_layers=1)
    assert rehearsed(path, "--gin_param", f"sections.Compute.attention={name!r}", files=("scale/bf16.gin",)) == 0
    out = capsys.readouterr().out
    assert attention_note(name, torch.bfloat16, None)[0] in out
    assert "attention is counted as" not in out
    assert "attention over padded rows is counted" not in out


def test_scores_that_a_card_writes_out_are_in_the_memory_and_the_bytes_and_fused_ones_are_not(tmp_path, capsys):
    """In bfloat16, of one layer, by rehearsal and by the dry run's estimate."""
    path = folder(tmp_path / "m", num_hidden_layers=1, vocab_size=64)
    found = {}
    for name in ("sdpa", "sdpa_math", "sdpa_cudnn"):
        out, bound = tmp_path / f"{name}.json", f"sections.Compute.attention={name!r}"
        long = ("sections.Sampling.max_new_tokens=200", "sections.PolicyUpdate.micro_tokens=4096")
        more = (*(word for one in (bound, *long) for word in ("--gin_param", one)), "--json", str(out))
        assert rehearsed(path, *more, files=("scale/bf16.gin",)) == 0
        found[name] = json.loads(out.read_text())
    kinds = {
        name: {one["kind"] for one in made["parts"] if "micro-batch" in one["piece"]} for name, made in found.items()
    }
    assert "attention" not in kinds.pop("sdpa_math")
    assert all("attention" in those for those in kinds.values())
    moved = {name: sum(x["bytes"] for x in made["parts"] if "micro" in x["piece"]) for name, made in found.items()}
    train = {name: next(x["bytes"] for x in made["memory"] if x["phase"] == "train") for name, made in found.items()}
    for name in kinds:
        assert moved["sdpa_math"] > 1.5 * moved[name], name
        assert train["sdpa_math"] > 1.2 * train[name], name
        assert found["sdpa_math"]["estimate"] > 1.2 * found[name]["estimate"], name
    assert 2 / 3 < found["sdpa_math"]["estimate"] / found["sdpa_math"]["peak"] < 3 / 2


def test_under_hybrid_shard_every_group_has_its_own_traffic(tmp_path, capsys):
    out = tmp_path / "out.json"
    given = ("--ranks", "16", "--hosts", "2", "--json", str(out))
    assert rehearsed(folder(tmp_path / "m"), *given, files=("scale/bf16.gin", "scale/hybrid_shard.gin")) == 0
    traffic = [one for one in json.loads(out.read_text())["traffic"] if one["piece"] == "last micro-batch"]
    ranks = {(one["name"], one["ranks"]) for one in traffic}
    assert {("reduce_scatter", 8), ("allreduce", 2)} <= ranks


ALSO = [("scale/bf16.gin", "scale/lora.gin"), ("scale/offload.gin",)]


@pytest.mark.parametrize(
    "files", [("scale/bf16.gin",), *(pytest.param(files, marks=pytest.mark.slow) for files in ALSO)]
)
def test_the_dry_runs_estimate_is_near(files, tmp_path, capsys):
    """Of a model whose blocks weigh, with rows as long as they may be: within a third of what is alive at once."""
    out = tmp_path / "out.json"
    path = folder(tmp_path / "m", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    assert rehearsed(path, "--json", str(out), files=files) == 0
    figures = json.loads(out.read_text())
    assert 2 / 3 < figures["estimate"] / figures["peak"] < 3 / 2
    both_have = check_differences(figures, capsys.readouterr().out)
    assert ("weights" in both_have) is ("scale/offload.gin" not in files)  # else they are the host's
    assert ("gathered weights and gradients" in both_have) is ("scale/lora.gin" not in files)
    moved = {one["piece"]: one for one in figures["transfers"]}
    assert bool(moved) is ("scale/offload.gin" in files)
    load = next(one for one in figures["memory"] if one["phase"] == "load")
    assert (load["host"] == load["holders"]["weights"] > 0) is bool(moved)
    if moved:  # blocks come for each pass, the root once; gradients go as large as the weights, in float32
        weights = moved["sync"]["to_card"]
        assert moved["last micro-batch"]["to_host"] == weights
        assert weights < moved["last micro-batch"]["to_card"] < 2 * weights
        assert all(one["transfers"] > 0 for one in figures["pieces"] if one["piece"] in moved)
        (update,) = (one for one in figures["parts"] if one["piece"] == "update" and one["part"] == "optimizer")
        assert update["launches"] == 0
        assert update["seconds"] == pytest.approx(update["bytes"] / Assumptions().host_memory)


def check_differences(figures: dict, said: str) -> set[str]:
    """By groups estimate and rehearsal add up to their peaks, and the group that differs most is printed with both."""
    every = figures["differences"]
    assert sum(one["estimate"] for one in every) == figures["estimate"]
    assert sum(one["rehearsed"] for one in every) == figures["peak"]
    apart = [abs(one["estimate"] - one["rehearsed"]) for one in every]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 0
    most = every[0]
    both = f"{most['name']}: {size(most['estimate'])} there, {size(most['rehearsed'])} here"
    assert f"most of the difference is {both}" in said
    assert "the rest" not in {one["name"] for one in every[:2]}
    both_have = {one["name"] for one in every if one["estimate"] and one["rehearsed"]}
    assert "activations and logits" in both_have
    return both_have


@pytest.mark.parametrize(
    ("more", "files", "says"),
    [
        (("--card", "b200"), (), "--card: got 'b200', wanted one of h100, a100, v100, 8gb"),
        (("--card", "v100"), ("scale/bf16.gin",), "--card: got v100, which computes bfloat16 in software"),
        (("--ranks", "6"), ("scale/tensor_parallel.gin",), "wanted a product of 6"),
        (("--ranks", "1024"), ("scale/full_shard.gin",), "prompts: got 24 a step for 1024 ranks"),
    ],
)
def test_bad_input_is_one_line(more, files, says, tmp_path, capsys):
    more = more if "tensor" not in "".join(files) else (*more, "--gin_param", "mesh.Parallelism.tp=4")
    assert rehearsed(folder(tmp_path / "m"), *more, files=files) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_a_model_without_a_configuration_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert rehearsed(tmp_path / "empty") == 2
    assert "without config.json; wanted a Hugging Face model" in capsys.readouterr().err


REFUSED = [
    (("--rehearse", "--dry_run"), "got --dry_run --rehearse, wanted one of them"),
    (("--rehearse", "--prompt_tokens", "0"), "--prompt_tokens: got 0, wanted at least 1"),
    (("--rehearse", "--ranks", "3", "--hosts", "2"), "got --ranks 3 --hosts 2, wanted as many ranks on every host"),
    (("--rehearse", "--ranks", "0"), "got --ranks 0 --hosts 1, wanted"),
    (("--rehearse", "--ranks", "5000"), "--ranks: got 5,000, wanted at most 1,024 with --rehearse"),
    (("--ranks", "4"), "got --ranks 4, wanted --dry_run or --rehearse with it"),
    (("--card", "a100"), "got --card a100, wanted --rehearse with it"),
    (("--json", "x.json"), "got --json x.json, wanted --rehearse with it"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_flags_that_do_not_go_together_are_one_line(given, says, capsys):
    with pytest.raises(SystemExit) as left:
        run.main(["--gin_file", "run/arithmetic.gin", *given])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {says}")
