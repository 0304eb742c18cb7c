"""A teacher on servers: the log-probs it gives, which servers it asks, how long, and what is refused before work."""

from copy import deepcopy

import pytest
import torch
from fakes import tokenizer
from vllm_stub import Stub

from grpo_fn.core.types import Rollout
from grpo_fn.shell.vllm.client import RequestRefused
from grpo_fn.shell.vllm.served_teacher import VllmTeacher


def served(*stubs: Stub, **knobs) -> VllmTeacher:
    defaults = {"max_model_len": 9, "max_requests": 4, "request_seconds": 2.0, "server_timeout": 0.3}
    return VllmTeacher(servers=[stub.url for stub in stubs], **{**defaults, **knobs})


@pytest.fixture
def stub():
    made = Stub()
    made.tokenizer = tokenizer()
    yield made
    made.kill()


ROWS = Rollout(
    tokens=torch.tensor([[3, 5, 7, 0], [4, 6, 2, 8]]),
    mask=torch.tensor([[False, True, True, False], [False, False, True, True]]),
    logp_sampled=torch.zeros(2, 4),
    truncated=torch.tensor([False, False]),
    text=("", ""),
)


def said(before: int, token: int) -> float:
    """As the stub says it."""
    return -1.0 - (before * 31 + token) % 97 / 7


def expected() -> torch.Tensor:
    found = [[0, said(3, 5), said(5, 7), 0], [0, 0, said(6, 2), said(2, 8)]]
    return torch.tensor(found)


def test_each_sampled_token_has_the_log_prob_that_the_server_says(stub):
    torch.testing.assert_close(served(stub).logp(ROWS), expected())
    asked = [sent["prompt"] for path, sent in stub.calls if path == "/v1/completions"]
    assert sorted(asked) == [[3, 5, 7], [4, 6, 2, 8]]  # without padding


@pytest.mark.parametrize("fault", [503, "half"])
def test_rows_that_a_server_leaves_go_to_another(stub, fault):
    other = Stub()
    stub.faults["/v1/completions"], stub.stuck = fault, True
    torch.testing.assert_close(served(stub, other).logp(ROWS), expected())
    other.kill()


def test_a_server_that_comes_back_in_time_is_waited_for(stub):
    stub.faults["/v1/completions"] = 503  # once
    torch.testing.assert_close(served(stub, server_timeout=20.0).logp(ROWS), expected())


def test_without_any_server_it_ends_with_what_was_wrong(stub):
    stub.kill()
    with pytest.raises(RuntimeError, match=rf"got no answer for 0.3 s, expected one: {stub.url}/v1/completions: "):
        served(stub).logp(ROWS)


def test_a_log_prob_that_is_none_is_refused(stub):
    stub.unknown = 7
    with pytest.raises(RequestRefused, match="expected a log-prob of each but the first"):
        served(stub).logp(ROWS)


def check(teacher: VllmTeacher, *, vocabulary: int | None = None, longest: int | None = 8) -> None:
    teacher.check_server("t", tokenizer(), vocabulary or len(tokenizer()), longest)


@pytest.mark.parametrize(
    ("knobs", "longest", "complaint"),
    [
        ({}, 9, r"got 't' with VllmTeacher.max_model_len 9, expected at least 10, or less .*max_total_tokens"),
        ({}, None, "expected at least no limit"),
        ({"max_model_len": 4097}, 8, r"got 't' \(http.*\), which reads 4096 tokens, expected .* 4097"),
    ],
)
def test_a_server_that_reads_less_than_the_policy_writes_is_refused(stub, knobs, longest, complaint):
    with pytest.raises(ValueError, match=complaint):
        check(served(stub, **knobs), longest=longest)


def test_a_smaller_vocabulary_and_a_temperature_are_refused(stub):
    stub.vocabulary = 20
    with pytest.raises(ValueError, match=r"cannot read id 20, expected each of the policy's 21: .*out of vocabulary"):
        check(served(stub), vocabulary=21)
    served(stub).check_temperature(1.0)
    with pytest.raises(ValueError, match=r"sections\.Sampling\.temperature: got 0.7 .* vLLM servers, expected 1.0"):
        served(stub).check_temperature(0.7)


def test_the_first_token_of_another_text_is_named(stub):
    class Other:
        def decode(self, ids):
            return "".join("?" if i in (11, 14) else tokenizer().decode([i]) for i in ids)

    check(served(stub))  # of the same tokenizer
    stub.tokenizer = Other()
    own = deepcopy(tokenizer()).decode([11])
    with pytest.raises(ValueError, match=r"whose tokenizer has '\?' as token 11, expected the policy's") as caught:
        check(served(stub))
    assert repr(own) in str(caught.value)


@pytest.mark.parametrize(
    "knobs", [{"servers": []}, {"servers": "http://here:80"}, {"max_requests": 0}, {"server_timeout": 0.0}]
)
def test_knobs_that_are_none_are_refused(knobs):
    rest = {"servers": ["http://here:80"], "max_model_len": 9, "max_requests": 4, "request_seconds": 1.0}
    with pytest.raises(ValueError, match=r"got .*, expected"):
        VllmTeacher(**{**rest, "server_timeout": 1.0, **knobs})
