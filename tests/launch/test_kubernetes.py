"""tools/launch/kubernetes.yaml: valid, consistent, and its container's command run as two pods would run it."""

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from launch.hosts import Host
from launch.launching import LAUNCH, Started, environment, flags, program, steps, trace

TEXT = (LAUNCH / "kubernetes.yaml").read_text()
SERVICE, CLAIM, JOB = yaml.safe_load_all(TEXT)
POD = JOB["spec"]["template"]["spec"]
(TRAINER,) = POD["containers"]
ENV = {entry["name"]: entry["value"] for entry in TRAINER["env"]}
OPTIONS = re.compile(r"^(\s*)# (- \{name: (?:NCCL|FI)_.*\}|vpc\.amazonaws.*|hugepages.*)$", re.MULTILINE)


@pytest.mark.parametrize("text", [TEXT, OPTIONS.sub(r"\1\2", TEXT)], ids=["as it is", "with every option"])
def test_the_manifests_are_valid(text: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in yaml.safe_load_all(text):
        validator.validate(document, "1.35", strict=True)
    for option in ("nodeSelector", "tolerations", "hostNetwork", "dnsPolicy", "securityContext", "FI_PROVIDER"):
        assert re.search(rf"^\s*# .*{option}", TEXT, re.MULTILINE), option


def test_names_counts_and_times_of_the_manifests_agree() -> None:
    spec = JOB["spec"]
    assert str(spec["completions"]) == str(spec["parallelism"]) == ENV["NODES"]
    assert str(TRAINER["resources"]["limits"]["nvidia.com/gpu"]) == ENV["GPUS"]
    assert spec["completionMode"] == "Indexed"
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--rdzv-endpoint={JOB['metadata']['name']}-0.{POD['subdomain']}:29400" in TRAINER["args"][0]
    (claimed,) = [v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"] if "persistentVolumeClaim" in v]
    assert claimed == CLAIM["metadata"]["name"]
    assert {mount["name"] for mount in TRAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    assert POD["terminationGracePeriodSeconds"] >= int(ENV["GRACE"]) + 30  # torchrun's own wait after it
    assert not any("$(" in arg for arg in [*TRAINER["command"], *TRAINER["args"]])  # which Kubernetes would expand
    assert (ENV["NCCL_DEBUG"], ENV["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == ("WARN", "7200")


def test_every_exit_code_means_to_the_job_what_it_means_to_the_trainer() -> None:
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {TRAINER["name"]}
    action = {code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]}
    assert action == {2: "FailJob", 76: "FailJob", 75: "Ignore"}  # all others count as failures, and are tried again


def pod(host: Host, index: int, folder: Path, given: list[str]) -> Started:
    """The container's command with its environment, with two things in place of the cluster's: devices and program."""
    script, name, *_ = TRAINER["args"]
    assert script.count("grpo_fn.run") == 1
    more = {"JOB_COMPLETION_INDEX": str(index), "GPUS": "1", "RUN_DIR": str(folder / "run"), "JOIN_TIMEOUT": "120"}
    command = [*TRAINER["command"], script.replace("grpo_fn.run", "launch.stand_in"), name, *given]
    return host.start(command, environment(folder / "bin") | ENV | more, folder / f"log{index}")


@pytest.mark.slow
def test_two_pods_meet_train_and_stop_together(two_hosts: list[Host], tmp_path: Path) -> None:
    program(tmp_path / "bin", "python", f'#!/usr/bin/env bash\nexec "{environment()["PYTHON"]}" "$@"\n')
    given = [arg for arg in flags(tmp_path, STEPS=100_000) if arg not in ("--run_dir", str(tmp_path / "run"))]
    with ExitStack() as stack:
        # The second pod is first: until pod 0 is there, no host answers under its name.
        late, early = (stack.enter_context(pod(two_hosts[n], n, tmp_path, given)) for n in (1, 0))
        early.until(lambda: len(steps(tmp_path / "run")) >= 2)
        early.process.send_signal(signal.SIGTERM)
        assert [early.code(), late.code()] == [75, 75], early.log.read_text() + late.log.read_text()
    assert steps(tmp_path / "run", 0) == steps(tmp_path / "run", 1)
    assert {(line["host"], line["size"], line["run_id"]) for line in trace(tmp_path / "run")} == {
        ("grpo-0", 2, "grpo"),
        ("grpo-1", 2, "grpo"),
    }
