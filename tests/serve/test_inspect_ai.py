"""inspect-ai, the real package, against our server: .venv-evals has it, with openai."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import VOCABULARY, qwen2_tied, tokenizer
from served import Client, served
from tool_serving import ScriptedService, tokenizer_of

from grpo_fn.shell.model import hf

WANTED = "NOT TESTED: it is not installed (docs/running/serve.md)"
inspect_ai = pytest.importorskip("inspect_ai", reason=WANTED)
pytest.importorskip("openai", reason=WANTED)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The command over a random model, in a process of its own."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    hf.export(qwen2_tied(VOCABULARY), tokenizer(), folder)
    argv = [sys.executable, "-m", "grpo_fn.serve", "--model", str(folder), "--port", "0", "--max_tokens", "10"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            line = process.stdout.readline()
            assert " at http://" in line, line
            yield Client(line.split(" at ")[1].strip().removesuffix("/v1"))
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_an_inspect_task(server: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy; the targets are what the server says of half of the questions."""
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    monkeypatch.setenv("OURS_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OURS_API_KEY", "none")
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    texts = [f"Tom has {i} apples." for i in range(6)]
    answers = []
    for text in texts:
        asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 6}
        answers.append(server.ask("/v1/chat/completions", **asked)["choices"][0]["message"]["content"])
    samples = [
        Sample(input=text, target=said if i % 2 else "#absent#")
        for i, (text, said) in enumerate(zip(texts, answers, strict=True))
    ]
    task = inspect_ai.Task(dataset=samples, solver=generate(), scorer=includes(ignore_case=False))
    (log,) = inspect_ai.eval(
        task, model="openai-api/ours/tiny", log_dir=str(tmp_path), temperature=0.0, max_tokens=6, seed=1
    )
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == answers
    assert len(log.samples) == 6
    assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(0.5)


def test_an_inspect_task_with_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns: the call that the model writes, and its answer to what inspect-ai's own tool said."""
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def add():
        async def execute(a: int, b: int) -> str:
            """Add two numbers.

            Args:
                a: the first.
                b: the second.
            """
            return str(a + b)

        return execute

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 30, "b": 12}}\n</tool_call>'
    one = ScriptedService([call, "It is 42."])
    monkeypatch.setenv("OURS_API_KEY", "none")
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    with served(one, reads=tokenizer_of("hermes")) as client:
        monkeypatch.setenv("OURS_BASE_URL", f"{client.url}/v1")
        task = inspect_ai.Task(
            dataset=[Sample(input="30 + 12?", target="42")], solver=[use_tools(add()), generate()], scorer=includes()
        )
        asked = {"model": "openai-api/ours/tiny", "model_args": {"strict_tools": False}, "max_tokens": 100}
        (log,) = inspect_ai.eval(task, log_dir=str(tmp_path), **asked)
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert one.asked[1].endswith(f"assistant: {call}\ntool: <add> 42\nassistant: ")
