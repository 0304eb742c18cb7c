"""Findings weigh as their worst; versions are judged by the range that is allowed and by what has been tested."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.doctor import checks, report, versions
from grpo_fn.doctor.checks import Reply
from grpo_fn.doctor.report import DoctorFinding, State
from grpo_fn.doctor.versions import Package, TestedVersion

texts = st.text(max_size=40)
found = st.lists(st.builds(DoctorFinding, st.sampled_from(["a", "b"]), texts, st.sampled_from(State), texts, texts))
numbers = st.integers(0, 30)


@given(found)
def test_the_exit_code_is_that_of_the_worst(rows: list[DoctorFinding]) -> None:
    weights = {"ok": 0, "absent": 0, "untested": 1, "warning": 1, "outside": 2, "missing": 2, "broken": 2}
    assert report.findings_exit_code(rows) == max([0, *(weights[row.state.label] for row in rows)])
    assert ("all well" in report.summary(rows)) == (report.findings_exit_code(rows) == 0)


@given(found)
def test_scripts_read_what_people_read(rows: list[DoctorFinding]) -> None:
    parsed = json.loads(json.dumps(report.findings_as_json(rows)))
    assert parsed["exit"] == report.findings_exit_code(rows)
    assert [row["seen"] for row in parsed["findings"]] == [row.seen for row in rows]
    table = report.findings_table(rows)
    for row in rows:
        assert report.one_line(row.seen) in table
        assert report.one_line(row.todo) in table
        assert row.state.label in table


@given(numbers, numbers, numbers)
def test_a_version_is_judged_by_its_place(major: int, minor: int, repair: int) -> None:
    package = Package("thing", ">=3.2,<7", (TestedVersion("3.4.1", "here"), TestedVersion("5.0.0", "there")))
    finding = versions.check_version(package, f"{major}.{minor}.{repair}", wanted=True)
    if not (3, 2) <= (major, minor) < (7, 0):
        wanted = State.OUTSIDE
    elif (major, minor) in {(3, 4), (5, 0)}:
        wanted = State.OK
    else:
        wanted = State.UNTESTED
    assert finding.state is wanted
    assert f"{major}.{minor}.{repair}" in finding.seen
    assert bool(finding.todo) == (wanted is not State.OK)


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("5.0.0+cpu", State.OK),
        ("5.0.0rc1", State.UNTESTED),
        ("5.0.0.dev20261121+cu130", State.UNTESTED),
        ("1!5.0.0", State.OUTSIDE),
        ("of my own", State.WARNING),
        ("", State.WARNING),
    ],
)
def test_versions_of_odd_forms_are_judged(version: str, state: State) -> None:
    package = Package("thing", ">=4,<7", (TestedVersion("5.0.0", "here"),))
    assert versions.check_version(package, version, wanted=True).state is state


def test_what_is_outside_is_named_with_what_to_install() -> None:
    finding = versions.check_version(Package("thing", ">=4,<7", ()), "7.1", wanted=True)
    assert finding == DoctorFinding(
        "versions", "thing", State.OUTSIDE, "7.1, wanted >=4,<7", "pip install 'thing>=4,<7'"
    )


@pytest.mark.parametrize(("wanted", "state"), [(True, State.MISSING), (False, State.ABSENT)])
def test_what_is_not_there_is_missing_where_it_is_wanted(wanted: bool, state: State) -> None:
    finding = versions.check_version(Package("thing", ">=4", (), extra="some"), None, wanted=wanted)
    assert finding.state is state
    assert ("grpo-fn[some]" in finding.todo) == wanted


def test_packages_that_ask_one_another_for_other_versions_are_named() -> None:
    requires = {
        "vllm": ["torch==2.13.0", "transformers<5.20,>=5.16.1", 'torch==1; extra == "old"', "gone>=1"],
        "peft": ['numpy<2; python_version < "3"', "NumPy>=1.17"],
    }
    (clash,) = versions.requirement_conflicts(
        requires, {"torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "2.4.6"}
    )
    assert (clash.subject, clash.state) == ("vllm", State.WARNING)
    assert "transformers<5.20" in clash.seen
    assert "5.23.0" in clash.seen


# -- verdicts on facts

DEVICE = {"name": "H", "capability": [9, 0], "free": 78e9, "total": 80e9, "bf16": True}
CUDA = {
    **{"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": 91900, "nccl": "2.28.9", "threads": 8},
    **{"devices": [DEVICE, DEVICE], "apart": [], "trouble": ""},
}
HOST = {
    **{"cpus": 8, "threads": None, "memory": 64e9, "memory_free": 60e9, "disk_free": 500e9},
    **{"shared": 32e9, "shared_free": 32e9, "files": 65536},
}
ENGINE = {
    **{"version": "0.32.0", "platform": "cpu", "architecture": "Qwen2ForCausalLM", "native": True, "generates": True},
    **{"dtype": "bfloat16", "positions": 128, "head_dim": 64, "head_dims": [32, 64, 128]},
}


def states(rows: object) -> dict[str, State]:
    return {row.subject: row.state for row in rows if row.state.weight}


def judged_host(**changes: object) -> dict[str, State]:
    facts = HOST | {k: v for k, v in changes.items() if k in HOST}
    known = {"parameters": 0, "gpus": 0, "vllm": False} | {k: v for k, v in changes.items() if k not in HOST}
    return states(checks.check_host(Reply(facts, ""), **known))


def test_a_machine_with_gpus_is_untested_and_otherwise_well() -> None:
    assert states(checks.devices(Reply(CUDA, ""))) == {"CUDA": State.UNTESTED}


@pytest.mark.parametrize(
    ("changes", "subject", "state", "todo"),
    [
        ({"devices": [], "trouble": "the driver is too old"}, "CUDA", State.BROKEN, "driver"),
        ({"devices": [DEVICE | {"bf16": False}]}, "cuda:0", State.WARNING, "scale/fp16.gin"),
        ({"devices": [DEVICE, DEVICE | {"free": 20e9}]}, "cuda:1", State.WARNING, "nvidia-smi"),
        ({"nccl": None}, "NCCL", State.BROKEN, "NCCL"),
        ({"apart": [[0, 1], [1, 0]]}, "peer access", State.WARNING, "topo -m"),
    ],
)
def test_what_is_wrong_with_devices_is_named(changes: dict, subject: str, state: State, todo: str) -> None:
    rows = {row.subject: row for row in checks.devices(Reply(CUDA | changes, ""))}
    assert rows[subject].state is state
    assert todo in rows[subject].todo


def test_one_device_needs_no_links() -> None:
    assert "NCCL" not in states(checks.devices(Reply(CUDA | {"devices": [DEVICE], "nccl": None}, "")))


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"memory_free": 1e9}, "memory"),
        ({"parameters": 7_000_000_000}, "memory"),
        ({"disk_free": 1e9}, "disk"),
        ({"shared": 64e6, "shared_free": 64e6, "gpus": 2}, "/dev/shm"),
        ({"shared": 64e6, "shared_free": 64e6, "vllm": True}, "/dev/shm"),
        ({"files": 1024}, "limits"),
        ({"threads": "64"}, "processors"),
        ({"threads": "0"}, "processors"),
        ({"threads": "many"}, "processors"),
    ],
)
def test_what_is_scarce_on_a_host_is_named(changes: dict, subject: str) -> None:
    assert judged_host(**changes) == {subject: State.WARNING}


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared": 64e6, "shared_free": 64e6}, {"files": -1}, {"threads": "8"}, {"shared": None, "gpus": 2}],
)
def test_what_is_enough_is_not(changes: dict) -> None:
    assert judged_host(**changes) == {}


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"generates": False}, {"refused": "not supported"}])
def test_what_vllm_cannot_do_is_broken_where_it_is_wanted(changes: dict, wanted: bool) -> None:
    finding = checks.check_vllm(ENGINE | changes, wanted=wanted)
    assert finding.state is (State.BROKEN if wanted else State.WARNING)
    assert finding.todo


def test_an_attention_without_a_list_of_heads_takes_any() -> None:
    assert checks.check_vllm(ENGINE | {"head_dims": None, "head_dim": 16}, wanted=True).state is State.OK


@given(st.text(max_size=200), st.integers(1, 16))
def test_a_reply_without_facts_is_a_finding(trouble: str, count: int) -> None:
    reply = Reply(None, trouble)
    rows = [
        *checks.devices(reply),
        *checks.check_host(reply, parameters=0, gpus=0, vllm=False),
        *checks.check_transformers(reply, gpus_without_bf16=False),
        *(checks.check_all_reduce(reply, count), checks.vllm_alone(reply)),
        *(checks.check_flash_attention(reply), checks.check_flash_attention_3(reply)),
    ]
    assert len(rows) == 7
    for row in rows:
        assert row.state.weight
        assert trouble in row.seen
        assert row.todo
