"""The doctor on machines that are not well: what is wrong is named with what to do, and never ends the doctor."""

import json
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from grpo_fn import doctor
from grpo_fn.doctor import Finding

ROOT = Path(__file__).resolve().parents[2]


def package(line: str, installed: dict[str, str], extra: str = "", needs: Collection[str] = ()) -> Finding:
    """What is found of a requirement where these versions are installed."""
    return doctor.package_finding(Requirement(line), extra, installed, needs)


def json_findings(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, dict[tuple[str, str], dict]]:
    """The exit code, and the findings by topic and subject, as scripts get them."""
    capsys.readouterr()
    code = doctor.main(["--json", *argv])
    reply = json.loads(capsys.readouterr().out)
    assert reply["exit"] == code
    return code, {(row["topic"], row["subject"]): row for row in reply["findings"]}


# -- the whole


def test_help_imports_no_torch_and_lists_the_exit_codes() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "grpo_fn.doctor", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "exit codes:" in done.stdout
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & {"torch", "gin"}


def test_scripts_and_people_are_given_the_same(capsys: pytest.CaptureFixture) -> None:
    code, rows = json_findings(capsys)
    assert code == max(doctor.WEIGHTS[row["state"]] for row in rows.values())
    assert doctor.main([]) == code
    table = capsys.readouterr().out
    for row in rows.values():
        assert bool(row["todo"]) == (row["state"] not in ("ok", "absent")), row
        assert row["todo"] in table
        if row["topic"] != "devices":  # memory in use is another a moment later
            assert " ".join(row["seen"].split()) in table
    assert rows["versions", "python"]["seen"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    for name in ("torch", "transformers"):
        assert rows["versions", name]["seen"].startswith(metadata.version(name))
    assert rows["devices", "CPU"]["seen"].endswith(" cores")
    assert ("devices", "CUDA") in rows


# -- versions


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("2.9.0", "outside", "expected <2.14,>=2.11, got 2.9.0"),
        ("2.14", "outside", "got 2.14"),
        ("2.12.0", "untested", "2.12.0, tested 2.11, 2.13"),
        ("2.13.4+cu130", "ok", "2.13.4+cu130"),
    ],
)
def test_a_version_is_judged_by_its_place(version: str, state: str, words: str) -> None:
    finding = package("torch>=2.11,<2.14", {"torch": version})
    assert finding.state == state
    assert words in finding.seen
    assert ("pip install 'torch<2.14,>=2.11'" in finding.todo) == (state == "outside")


@pytest.mark.parametrize(("needs", "state"), [([], "absent"), (["thing"], "missing")])
def test_a_package_of_an_extra_is_absent_until_it_is_needed(needs: list[str], state: str) -> None:
    finding = package("thing>=4", {}, "some", needs)
    assert finding.state == state
    assert ("grpo-fn[some]" in finding.todo) == bool(needs)


@pytest.mark.parametrize("name", ["vllm", "flash-attn"])
def test_a_package_that_is_there_has_to_import(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"{doctor.MODULES[name]}.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    file.write_text("raise OSError('undefined symbol: _ZN3c10')")
    finding = package(name, {name: "2.8"}, "some")
    assert (finding.state, finding.seen) == ("broken", "2.8 does not import: OSError: undefined symbol: _ZN3c10")
    assert finding.todo


def test_a_torch_that_does_not_import_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from grpo_fn.doctor import main; "
    code += "sys.exit(main(['--json', '--gin_file', 'run/arithmetic.gin']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    rows = {row["subject"]: row for row in json.loads(done.stdout)["findings"]}
    assert rows["torch"]["state"] == rows["gin"]["state"] == "broken"
    assert "libcudart.so.99" in rows["torch"]["seen"]
    assert rows["CPU"]["state"] == "ok"


# -- what a configuration needs


@pytest.mark.parametrize(
    ("layers", "params", "needs"),
    [
        ([], [], set()),
        (["scale/adamw_8bit.gin"], ["sections.Compute.attention='flash_attention_2'"], {"flash-attn", "torchao"}),
        (["engine/vllm_colocated.gin"], [], {"vllm"}),
        (["engine/vllm_dedicated.gin"], ["sections.Logging.mirror=@tracker.wandb"], {"vllm", "wandb"}),
    ],
)
def test_a_configuration_says_what_it_needs(layers: list[str], params: list[str], needs: set[str]) -> None:
    names, (finding,) = doctor.configuration_needs(["run/arithmetic.gin", *layers], params)
    assert names == needs
    assert (finding.state, finding.seen) == ("ok", f"wants {', '.join(sorted(needs)) or 'no extra'}")


# -- devices


def fake_torch(*capabilities: tuple[int, int], built: str | None = "13.0") -> SimpleNamespace:
    """A torch that is built for a CUDA and sees cards of these capabilities."""
    cuda = SimpleNamespace(
        is_available=lambda: bool(capabilities),
        device_count=lambda: len(capabilities),
        get_device_properties=lambda i: SimpleNamespace(name="H", major=capabilities[i][0], minor=capabilities[i][1]),
        mem_get_info=lambda i: (78_000_000_000, 80_000_000_000),
    )
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=built))


@pytest.mark.parametrize(
    ("torch", "driver", "states"),
    [
        (fake_torch((9, 0), (7, 5)), True, {"CUDA": "ok", "cuda:0": "ok", "cuda:1": "warning"}),
        (fake_torch((8, 0)), False, {"CUDA": "ok", "cuda:0": "ok"}),
        (fake_torch(), True, {"CUDA": "broken"}),
        (fake_torch(), False, {"CUDA": "ok"}),
        (fake_torch(built=None), True, {"CUDA": "ok"}),
    ],
)
def test_cards_are_judged(
    torch: SimpleNamespace, driver: bool, states: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver:
        (tmp_path / "version").write_text("580.65.06\n")
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    monkeypatch.setitem(sys.modules, "torch", torch)
    findings = {finding.subject: finding for finding in doctor.device_findings()}
    assert {name: finding.state for name, finding in findings.items()} == {"CPU": "ok", **states}
    assert ("580.65.06" in findings["CUDA"].seen) == (driver and torch.version.cuda is not None)
    if "cuda:1" in states:
        assert findings["cuda:0"].seen == "H, compute capability 9.0, 78 of 80 GB free"
        assert "scale/fp16.gin" in findings["cuda:1"].todo
