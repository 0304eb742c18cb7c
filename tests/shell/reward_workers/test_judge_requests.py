"""Rows that a judge scores, against a real server: retries, deadlines, what is on record, and what it costs."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from judge_server import ANSWER, JudgeServer, Reply, judge_server, mark_in, said

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import boxed
from grpo_fn.rewards.judge import Judge, marked_score
from grpo_fn.rewards.wrappers import by_task, with_timeout
from grpo_fn.shell.reward_workers.judge_client import JudgeAnswer, JudgeRecord, RecordedAnswer, check_endpoint
from grpo_fn.shell.reward_workers.reward_pool import Outcome, RewardError, RewardPool

TEXTS = ("one", "two", "three", "four", "five")


def judge_at(up: JudgeServer | str, **changes: Any) -> Judge:
    knobs = {
        **{"name": "judge", "endpoint": up if isinstance(up, str) else up.url, "model": "judge-1", "system": ""},
        **{"template": "{fence}\n{completion}\n{fence}\n{mark}: N", "read": partial(marked_score, low=0.0, high=10.0)},
        **{"sampling": {"temperature": 0.0}, "concurrency": 4, "retries": 2, "backoff_seconds": 0.02},
        **{"request_seconds": 5.0, "batch_seconds": 20.0, "max_failures": 3, "api_key_variable": None},
    }
    return Judge(**{**knobs, **changes})


def pool(record: JudgeRecord | None = None) -> RewardPool:
    made = RewardPool(workers=1, timeout_per_completion=30.0, memory_mb=1024, stop_on_error=True)
    if record is not None:
        made.judge_record = record
    return made


def rows(texts: Sequence[str], first: int = 0) -> tuple[list[Problem], list[Completion]]:
    problems = [Problem(first + place, "Count.", "1", {}) for place in range(len(texts))]
    return problems, [Completion(text, 1, False) for text in texts]


def judged(
    fn: Any, texts: Sequence[str], record: JudgeRecord | None = None, first: int = 0
) -> tuple[list[Outcome], dict]:
    with pool(record) as made:
        outcomes = made.judge(fn, *rows(texts, first))
        return outcomes, dict(made.costs)


def grade(question: str, before: int) -> Reply:
    """Its place among the texts, of ten."""
    place = next(place for place, text in enumerate(TEXTS) if f"\n{text}\n" in question)
    return said(f"Fine.\n{mark_in(question)}: {place}")


def first_then(reply: Reply, times: int) -> Callable[[str, int], Reply]:
    return lambda question, before: reply if before < times else grade(question, before)


def test_rows_are_scored_in_order_many_at_once_and_counted() -> None:
    with judge_server(lambda question, before: grade(question, before)._replace(seconds=0.1)) as up:
        outcomes, costs = judged(judge_at(up), [*TEXTS, "one"])
    assert [outcome.value for outcome in outcomes] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.0])
    assert 2 <= up.most_under_way <= 4
    assert len(up.questions) == 5  # equal questions are one
    seconds, none = costs.pop("seconds"), dict.fromkeys(("retries", "failures", "unreadable"), 0)
    assert costs == {"requests": 5, "prompt_tokens": 250, "completion_tokens": 35, **none}
    assert 0.5 <= seconds < 10


@pytest.mark.parametrize(
    "reply",
    [Reply(b"<html>upstream connect error</html>", 503), Reply(b"<html>not JSON</html>"), Reply(ANSWER, seconds=0.8)],
    ids=["503", "malformed", "slow"],
)
def test_a_request_that_may_go_well_later_is_sent_again(reply: Reply) -> None:
    with judge_server(first_then(reply, 2)) as up:
        outcomes, costs = judged(judge_at(up, request_seconds=0.4 if reply.seconds else 30.0), ["three"])
    assert [outcome.value for outcome in outcomes] == pytest.approx([0.2])
    assert (costs["requests"], costs["retries"], costs["failures"]) == (3, 2, 0)


def test_a_server_that_wants_to_be_left_alone_is() -> None:
    busy = Reply({"error": {"message": "slow down"}}, 429, (("Retry-After", "1"),))
    with judge_server(first_then(busy, 1)) as up:
        start = time.monotonic()
        outcomes, _ = judged(judge_at(up), ["two"])
    assert outcomes[0].value == pytest.approx(0.1)
    assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize(
    ("reply", "reason", "requests"),
    [
        (Reply({"error": "overloaded"}, 500), r"got no answer to 3 requests, the last: status 500: .*overloaded", 3),
        (Reply({"error": "maximum context length is 32"}, 400), r"got status 400: .*maximum context length", 1),
        (Reply(b"[" * 100_000), r"got no answer to 3 requests, the last: got '\[+', expected a chat completion", 3),
        (Reply({"choices": "none"}), "expected a chat completion", 3),
        (Reply([]), "expected a chat completion", 3),
        (Reply({**ANSWER, "usage": [1]}), "expected a chat completion", 3),
        (Reply(b"\xff\x00"), "expected a chat completion", 3),
        (Reply(b'"' + b"x" * 2**22 + b'"'), "got more than 2097152 bytes for an answer", 1),
    ],
    ids=["500", "400", "nested", "no choices", "a list", "odd usage", "no text", "large"],
)
def test_a_row_without_an_answer_is_none_and_says_why(reply: Reply, reason: str, requests: int) -> None:
    with judge_server(lambda question, before: reply if "\none\n" in question else grade(question, before)) as up:
        outcomes, costs = judged(judge_at(up), ["two", "one", "three"])
    assert [outcome.value for outcome in outcomes] == [pytest.approx(0.1), None, pytest.approx(0.2)]
    assert re.search(reason, outcomes[1].reason), outcomes[1].reason
    assert (costs["failures"], costs["requests"]) == (1, 2 + requests)


def test_the_time_of_a_batch_is_limited_and_what_was_waited_for_is_said() -> None:
    with judge_server(lambda question, before: grade(question, before)._replace(seconds=0.5)) as up:
        start = time.monotonic()
        outcomes, _ = judged(partial(with_timeout, reward=judge_at(up, concurrency=1), seconds=0.8), TEXTS[:2])
        assert time.monotonic() - start < 3.0
    assert [outcome.value for outcome in outcomes] == [pytest.approx(0.0), None]
    assert re.fullmatch(
        r"late: http://127.0.0.1:\d+/v1 gave no answer within 0.8 s, the wait for one of 1 requests under way "
        r"included; request 1 was under way",
        outcomes[1].reason,
    )


def reader_with_a_bug(text: str, mark: str) -> float | None:
    return 1 / 0 if text else None


def test_tokens_beyond_any_number_count_as_none_and_a_bug_in_a_reader_costs_its_row() -> None:
    with judge_server(lambda question, before: Reply({**ANSWER, "usage": {"prompt_tokens": 10**400}})) as up:
        _, costs = judged(judge_at(up), ["one"])
        assert costs["prompt_tokens"] == 0
    with judge_server(grade) as up, pytest.raises(RewardError, match="ZeroDivisionError"):
        judged(judge_at(up, read=reader_with_a_bug), ["two"])


@pytest.mark.parametrize("line", [b"{}", b"[" * 100_000, b'{"digest": 1, "uid": 2, "text": "a"}', b'{"digest": "a"'])
def test_a_bad_line_of_the_record_names_file_and_line(line: bytes, tmp_path: Path) -> None:
    good = JudgeRecord(tmp_path, 0)
    good.add([RecordedAnswer("a", 1, JudgeAnswer("text"))])
    with (tmp_path / "rank_0.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"rank_0\.jsonl:2: got .*, expected a"):
        JudgeRecord(tmp_path, 0).open()


@pytest.mark.parametrize("text", ["", "MARK: 70"])
def test_an_answer_without_a_verdict_is_none_and_not_0(text: str) -> None:
    with judge_server(lambda question, before: said(text.replace("MARK", mark_in(question)))) as up:
        outcomes, costs = judged(judge_at(up), ["one"])
    assert outcomes[0].value is None
    assert outcomes[0].reason == "the judge's answer has no verdict that can be read"
    assert (costs["unreadable"], costs["failures"], costs["requests"]) == (1, 0, 1)


def test_a_judge_that_is_gone_ends_the_rows_with_what_was_waited_for_and_is_not_on_record(tmp_path: Path) -> None:
    with judge_server(grade) as up:
        pass
    record = JudgeRecord(tmp_path, 0)
    with pytest.raises(RewardError, match=r"no answer to 3 questions in a row .*max_failures.*http://127\.0\.0\.1"):
        judged(judge_at(up, retries=0), TEXTS, record)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("status", "expected"), [(401, "a key"), (404, "a chat completions endpoint that has the model")]
)
def test_a_status_that_no_question_gets_past_ends_the_rows_at_once(status: int, expected: str) -> None:
    with judge_server(lambda question, before: Reply({"error": "no"}, status)) as up:
        judge = judge_at(up, max_failures=100)
        with pytest.raises(RewardError, match=f"got status {status}, expected {expected}"):
            judged(judge, TEXTS)


def test_questions_on_record_are_not_sent_again(tmp_path: Path) -> None:
    def some(question: str, before: int) -> Reply:
        if "\nfour\n" in question:
            return Reply({"error": "no"}, 400)
        return said("hm") if "\nfive\n" in question else grade(question, before)

    with judge_server(some) as up:
        judge = judge_at(up)
        was = judged(judge, TEXTS, JudgeRecord(tmp_path, 0))
        assert len(up.questions) == 5
    assert judged(judge, TEXTS, JudgeRecord(tmp_path, 0)) == was  # the server is gone; failures and costs are there too
    assert [outcome.value for outcome in was[0]] == [*map(pytest.approx, (0.0, 0.1, 0.2)), None, None]
    elsewhere, costs = judged(judge, TEXTS[:3], JudgeRecord(tmp_path, 1), first=10)  # another rank, and other problems
    assert [outcome.value for outcome in elsewhere] == [outcome.value for outcome in was[0][:3]]
    assert (costs["requests"], costs["prompt_tokens"]) == (0, 0)


def test_a_replay_asks_no_server_and_writes_nothing(tmp_path: Path) -> None:
    with judge_server(grade) as up:
        was = judged(judge_at(up), TEXTS[:2], JudgeRecord(tmp_path, 0))[0]
        before = (tmp_path / "rank_0.jsonl").read_bytes()
        record = JudgeRecord(tmp_path, 0)
        record.read_only = True
        assert judged(judge_at(up), TEXTS[:2], record)[0] == was
        with pytest.raises(RewardError, match="problem 0: got a completion that the run has no judge's answer about"):
            judged(judge_at(up), ["three"], record)
        assert len(up.questions) == 2
    assert (tmp_path / "rank_0.jsonl").read_bytes() == before


def test_a_torn_line_is_cut_off_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    first, second = RecordedAnswer("a", 1, JudgeAnswer("7")), RecordedAnswer("b", 1, JudgeAnswer("8"))
    path, record = tmp_path / "rank_0.jsonl", JudgeRecord(tmp_path, 0)

    def found() -> list[JudgeAnswer | None]:
        return [record.find(name, 1) for name in "ab"]

    record.add([first, second])
    assert found() == [JudgeAnswer("7"), JudgeAnswer("8")]
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    record = JudgeRecord(tmp_path, 0)
    assert found() == [JudgeAnswer("7"), None]
    record.add([second])
    assert path.read_bytes() == whole
    path.write_text(json.dumps({"digest": "a"}) + "\n")
    record = JudgeRecord(tmp_path, 0)
    with pytest.raises(ValueError, match=r"rank_0\.jsonl:1: got .*expected a recorded answer"):
        found()


def test_ranks_read_each_others_answers_and_their_own_first(tmp_path: Path) -> None:
    for rank, text in enumerate(("zero", "one")):
        JudgeRecord(tmp_path, rank).add(
            [RecordedAnswer("a", 1, JudgeAnswer(text)), RecordedAnswer(f"{rank}", 1, JudgeAnswer(text))]
        )
    for rank, text in enumerate(("zero", "one")):
        record = JudgeRecord(tmp_path, rank)
        assert record.find("a", 1).text == text
        assert [record.find(digest, 1).text for digest in "01"] == ["zero", "one"]


def test_a_table_asks_the_judge_about_its_task_alone() -> None:
    problems, completions = rows(["one", r"\boxed{1}", "three"])
    problems = [problem._replace(meta={"task": name}) for problem, name in zip(problems, "aba", strict=True)]
    with judge_server(grade) as up, pool() as made:
        fn = partial(by_task, rewards={"a": judge_at(up), "b": boxed})
        assert made.score(fn, problems, completions) == [0.0, 1.0, pytest.approx(0.2)]
    assert len(up.questions) == 2


def test_the_key_comes_from_the_environment_and_goes_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server(grade) as up:
        judge = judge_at(up, api_key_variable="JUDGE_TEST_KEY")
        with pytest.raises(ValueError, match="got no environment variable JUDGE_TEST_KEY"):
            judged(judge, ["one"])
        monkeypatch.setenv("JUDGE_TEST_KEY", "sesame")
        judged(judge, ["one"])
        assert [sent["authorization"] for sent in up.headers] == ["Bearer sesame"]
    assert "sesame" not in repr(judge) + repr(vars(judge))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "judge-2"}, r"got judge.Judge.model 'judge-2', expected one that http://\S+ has: judge-1"),
        ({"endpoint": "http://127.0.0.1:1/v1"}, r"got no answer from http://127\.0\.0\.1:1/v1 within 5 s"),
        ({"endpoint": "WRONG"}, r"got status 404 for http://\S+/v2/models, expected the list of models"),
    ],
)
def test_an_endpoint_is_looked_at(changes: dict[str, str], complaint: str) -> None:
    with judge_server(grade) as up:
        asyncio.run(check_endpoint(judge_at(up)))
        if changes.get("endpoint") == "WRONG":
            changes = {"endpoint": up.url.replace("/v1", "/v2")}
        with pytest.raises(ValueError, match=complaint):
            asyncio.run(check_endpoint(judge_at(up, **changes)))
    assert up.questions == []
