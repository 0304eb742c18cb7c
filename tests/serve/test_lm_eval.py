"""lm-eval, the real package, over our model: by our class, over our endpoint, and by its own Hugging Face model.

.venv-evals/bin/python -m pytest -m slow tests/serve/test_lm_eval.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fakes import VOCABULARY, qwen2_tied, tokenizer
from served import Client

from grpo_fn.shell.model import hf
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.packed_input import pack_shared_prompts

lm_eval = pytest.importorskip("lm_eval", reason="NOT TESTED: lm-eval is not installed (pip install 'grpo-fn[lm_eval]')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from grpo_fn.serve.lm_eval_model import GrpoFnLM  # noqa: E402

NEW = 10  # tokens of a completion
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["{{a}}", "{{b}}"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITE = """
task: tiny_write
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 10, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""
ROLL = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{question}}{{question}}{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 64 positions as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    hf.export(qwen2_tied(VOCABULARY), tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of our own, over a jsonl file."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"Tom has {i} apples.", "a": f" He buys {2 * i}", "b": " no", "label": i % 2} for i in range(8)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("write", WRITE), ("roll", ROLL)):
        (path / f"{name}.yaml").write_text(text.replace("ROWS", str(path / "rows.jsonl")))
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[GrpoFnLM]:
    one = GrpoFnLM(str(folder), max_gen_toks=NEW, max_tokens=NEW)
    with closing(one.service):
        yield one


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    """The command, in a process of its own."""
    argv = [sys.executable, "-m", "grpo_fn.serve", "--model", str(folder), "--port", "0", "--max_tokens", str(NEW)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=offline()) as process:
        try:
            line = process.stdout.readline()
            assert " at http://" in line, line
            yield Client(line.split(" at ")[1].strip().removesuffix("/v1"))
        finally:
            process.terminate()
            assert process.wait(30) == 0


@pytest.fixture(scope="module")
def theirs(folder: Path) -> HFLM:
    """lm-eval's own model of the same folder."""
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


@pytest.fixture(scope="module")
def client(folder: Path, server: Client) -> LocalCompletionsAPI:
    """lm-eval's client of OpenAI-compatible servers, of ours."""
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_length=63,
        max_gen_toks=NEW,
        num_concurrent=1,
        batch_size=3,
    )


def offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", i, 1))
        for i, each in enumerate(arguments)
    ]


PAIRS = [("Tom has", " 12 apples"), ("How many", " are there?"), ("", "Tom"), ("a ", "b"), ("a\n", "Tom")]


def logp_of(context: str, continuation: str) -> tuple[float, bool]:
    """By the module that is trained; greedy by the plain model."""
    spelt = tokenizer()
    ids = spelt(context + continuation)["input_ids"]
    n = len(spelt(context.rstrip())["input_ids"])
    if not context:
        ids, n = [spelt.eos_token_id, *ids], 1
    made = qwen2_tied(VOCABULARY)
    of = LogprobModel(made, temperature=1.0, logits_chunk_elements=10**5, input_packing=pack_shared_prompts)
    mask = torch.arange(len(ids))[None] >= n
    with torch.no_grad():
        logp = float(of(torch.tensor([ids]), mask)[0].sum())
        likeliest = qwen2_tied(VOCABULARY)(input_ids=torch.tensor([ids])).logits[0, n - 1 : -1].argmax(-1)
    return logp, likeliest.tolist() == ids[n:]


def test_loglikelihood_is_the_log_prob_of_our_model(ours: GrpoFnLM) -> None:
    got = ours.loglikelihood(asked("loglikelihood", *PAIRS))
    for (logp, greedy), pair in zip(got, PAIRS, strict=True):
        wanted = logp_of(*pair)
        assert logp == pytest.approx(wanted[0], abs=1e-4)
        assert greedy is wanted[1]


def test_what_greedy_decoding_writes_is_found_to_be_greedy(ours: GrpoFnLM) -> None:
    """The other half of `is_greedy`, which random texts never are."""
    row = ours.generate_until(asked("generate_until", ("Tom has", {"until": [], "max_gen_toks": 4})))[0]
    ids = tokenizer()("Tom has")["input_ids"]
    made, found = qwen2_tied(VOCABULARY), []
    for _ in range(4):
        with torch.no_grad():
            found.append(int(made(input_ids=torch.tensor([ids + found])).logits[0, -1].argmax()))
    assert row == tokenizer().decode(found, skip_special_tokens=True)
    ((_, greedy),) = ours._loglikelihood_tokens([(("", ""), ids, found)])
    ((_, other),) = ours._loglikelihood_tokens([(("", ""), ids, [*found[:-1], found[-1] - 1])])
    assert (greedy, other) == (True, False)


def test_three_ways_to_one_loglikelihood(ours: GrpoFnLM, theirs: HFLM, client: LocalCompletionsAPI) -> None:
    got = [one.loglikelihood(asked("loglikelihood", *PAIRS)) for one in (ours, theirs, client)]
    for mine, own, served in zip(*got, strict=True):
        assert mine[0] == pytest.approx(own[0], abs=1e-4)
        assert mine[0] == pytest.approx(served[0], abs=1e-4)
        assert mine[1] == own[1] == served[1]
    assert len({round(logp, 3) for logp, _ in got[0]}) == len(PAIRS)


def test_long_texts(ours: GrpoFnLM, theirs: HFLM, capfd: pytest.CaptureFixture[str]) -> None:
    """Rolling in windows; and what does not fit loses tokens on the left, which is said."""
    texts = [("Tom has 12 apples. " * n,) for n in (1, 9, 20)]
    got = [one.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) for one in (ours, theirs)]
    assert got[0] == pytest.approx(got[1], abs=1e-3)
    assert "lost tokens" not in capfd.readouterr().err
    long = [("Tom has 12 apples. " * 20, " How many")]
    mine, own = (one.loglikelihood(asked("loglikelihood", *long)) for one in (ours, theirs))
    assert mine[0][0] == pytest.approx(own[0][0], abs=1e-4)
    assert "1 texts were longer than the model's 64 positions and lost tokens on the left" in capfd.readouterr().err


GENERATIONS = [("Tom has", {"until": ["e"]}), ("How many", {"until": ["\n", "zz"], "max_gen_toks": 6}), ("a", {})]


def test_three_ways_to_one_text(ours: GrpoFnLM, theirs: HFLM, client: LocalCompletionsAPI) -> None:
    given = [(text, {"max_gen_toks": NEW, "until": [], **how}) for text, how in GENERATIONS]
    got = []
    for one in (ours, theirs, client):
        copies = [(text, dict(how)) for text, how in given]
        got.append(one.generate_until(asked("generate_until", *copies)))
    assert got[0] == got[1] == got[2]
    assert all(got[0])


def test_drawn_texts_have_seeds_and_repeats_are_samples(ours: GrpoFnLM) -> None:
    how = {"do_sample": True, "temperature": 1.0, "until": []}
    twice = [*asked("generate_until", ("Tom", how)), *asked("generate_until", ("Tom", how))]
    first, second = ours.generate_until(twice)
    assert first != second
    assert ours.generate_until(twice) == [first, second]
    assert ours.generate_until(twice[:1]) == [first]
    with pytest.raises(ValueError, match="generation_kwargs: got num_beams, wanted none but"):
        ours.generate_until(asked("generate_until", ("a", {"num_beams": 2})))
    with pytest.raises(ValueError, match="max_gen_toks: got 11, wanted 1 to max_tokens, 10"):
        ours.generate_until(asked("generate_until", ("a", {"max_gen_toks": 11})))


def test_tasks_of_our_own_by_all_three(ours: GrpoFnLM, theirs: HFLM, client: LocalCompletionsAPI, tasks: Path) -> None:
    names = ["tiny_choice", "tiny_write"]
    found = []
    for one in (ours, theirs, client):
        manager = TaskManager(include_path=str(tasks))
        results = lm_eval.simple_evaluate(model=one, tasks=names, task_manager=manager, bootstrap_iters=0)
        choice, write = (results["results"][name] for name in names)
        assert choice["sample_len"] == write["sample_len"] == 8
        texts = [sample["filtered_resps"] for sample in results["samples"]["tiny_write"]]
        logps = [pair[0] for sample in results["samples"]["tiny_choice"] for pair in sample["filtered_resps"]]
        found.append((choice["acc,none"], choice["acc_norm,none"], write["exact_match,none"], texts, logps))
    assert found[0][:4] == found[1][:4] == found[2][:4]
    assert found[0][4] == pytest.approx(found[1][4], abs=1e-4)
    assert found[0][4] == pytest.approx(found[2][4], abs=1e-4)
    assert 0 < found[0][0] < 1
    rolled = []
    for one in (ours, theirs):
        manager = TaskManager(include_path=str(tasks))
        results = lm_eval.simple_evaluate(model=one, tasks=["tiny_perplexity"], task_manager=manager, bootstrap_iters=0)
        rolled.append(results["results"]["tiny_perplexity"]["bits_per_byte,none"])
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)


def test_their_command_knows_our_model(folder: Path, tasks: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "grpo_fn.serve.lm_eval_cli", "run", "--model", "grpo_fn"]
    argv += ["--model_args", f"model={folder},max_tokens=10", "--tasks", "tiny_choice", "--include_path", str(tasks)]
    done = subprocess.run(
        [*argv, "--output_path", str(tmp_path / "out")], env=offline(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "tiny_choice" in done.stdout
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["tiny_choice"]["sample_len"] == 8
