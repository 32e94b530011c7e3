"""A judge behind real HTTP, its prompt, and the parsers of its answer: tries again, limits, deadlines, and a kind for every failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_rl.config.schema.tree import JudgeConfig, RewardConfig
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.contract import Outcome, RewardResult
from grpo_rl.rewards.models.judge_answers import json_score, marked_score, parser_for
from grpo_rl.rewards.models.judge_question import JudgeSpec, judge_sample, load_template, question
from grpo_rl.rewards.runtime.judge_process import JudgeProcess, share_of
from grpo_rl.rewards.runtime.runner import JudgeRunner
from grpo_rl.types import Prompt, Rollout

Answer = tuple[int, bytes, dict[str, str]]


def completion(text: str) -> Answer:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(), {}


def state(code: int, text: str = "", **headers: str) -> Answer:
    return code, text.encode(), headers


@dataclass
class Server:
    """Answers by `reply`, which sees the request's number and body; keeps what it was sent."""

    url: str = ""
    reply: Callable[[int, dict[str, Any]], Answer] = lambda number, body: completion("score: 5")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    release: threading.Event = field(default_factory=threading.Event)
    state_of_models: int = 404
    at_once: int = 0
    most_at_once: int = 0


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(state.state_of_models)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.bodies)
                state.bodies.append(body)
                state.times.append(time.monotonic())
                state.keys.append(self.headers.get("Authorization"))
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            assert self.path == "/v1/chat/completions"
            code, content, headers = state.reply(number, body)
            with state.lock:
                state.at_once -= 1
            try:
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # whoever asked has given up

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    yield state
    state.release.set()
    http.shutdown()
    thread.join(120)
    http.server_close()


@pytest.fixture
def judge(server: Server) -> Iterator[Callable[..., JudgeRunner]]:
    made: list[JudgeRunner] = []

    def make(**settings: Any) -> JudgeRunner:
        spec = spec_of(**{"base_url": server.url, "backoff_s": 0.01, "timeout_s": 5.0} | settings)
        made.append(JudgeRunner(spec.config, partial(JudgeProcess, spec)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def spec_of(**settings: Any) -> JudgeSpec:
    return JudgeSpec.of(RewardConfig(judge=JudgeConfig(**{"model": "m"} | settings)))


def rollout(sample: int, text: str = "a", response_ids: tuple[int, ...] = (1,)) -> Rollout:
    return Rollout(
        Prompt("p", (1,), "ask", "test", "4"), sample, response_ids, (0.0,), "stop", ((0, len(response_ids)),), text=text
    )


def one(judge: JudgeRunner, sample: int = 0) -> Outcome:
    (result,) = judge.wait([rollout(sample)])
    return result


def test_a_judge_that_is_not_there_or_refuses_the_key_is_known_before_the_start(server, judge, monkeypatch):
    judge().check_started()
    with pytest.raises(RewardError, match=r"reward.judge.base_url=http://127.0.0.1:9/v1: nobody answers there \(ConnectError"):
        judge(base_url="http://127.0.0.1:9/v1").check_started()
    server.state_of_models = 401
    with pytest.raises(RewardError, match=r"the key is refused \(401\)"):
        judge().check_started()


def test_each_response_is_asked_about_once_and_scored_in_order(server, judge):
    server.reply = lambda number, body: completion(f"score: {len(body['messages'][-1]['content'])}")
    asked = judge(template="{response}", system="be strict", max_tokens=7, extra_body={"seed": 3})
    rollouts = [rollout(i, "x" * (i + 1)) for i in range(12)]
    for item in rollouts[:6]:
        asked.submit(item)
        asked.submit(item)
    assert [result.score for result in asked.wait(rollouts)] == [float(i + 1) for i in range(12)]
    assert len(server.bodies) == 12
    first = next(body for body in server.bodies if body["messages"][-1]["content"] == "x")
    assert first == {
        "model": "m",
        "messages": [{"role": "system", "content": "be strict"}, {"role": "user", "content": "x"}],
        "max_tokens": 7,
        "temperature": 0.0,
        "seed": 3,
    }


def test_judging_starts_at_submission_and_the_same_sample_of_a_later_step_is_judged_anew(server, judge):
    asked_about = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Answer:
        asked_about.set()
        return completion(f"score: {number}")

    server.reply = reply
    asked = judge()
    asked.submit(rollout(0))
    assert asked_about.wait(120)
    assert asked.wait([rollout(0)]) == [RewardResult(0.0)]
    assert asked.wait([rollout(0, response_ids=(2, 3))]) == [RewardResult(1.0)]


def test_what_may_be_over_soon_is_tried_again(server, judge):
    runner = judge()
    for trouble in (state(429), state(500, "oops"), state(503), state(408), state(200, "{broken"), state(200, "[]")):
        earlier_requests = len(server.bodies)
        server.reply = lambda number, body, trouble=trouble, earlier_requests=earlier_requests: (
            trouble if number < earlier_requests + 2 else completion("score: 9")
        )
        assert one(runner, sample=earlier_requests) == RewardResult(9.0), trouble
        assert len(server.bodies) == earlier_requests + 3, trouble


def test_the_wait_before_the_next_try_doubles_and_is_at_least_what_the_endpoint_asks_for(server, judge):
    answers = [state(429, retry_after="0.3"), state(500), state(500), completion("score: 1")]
    server.reply = lambda number, body: answers[number]
    assert one(judge(backoff_s=0.05)) == RewardResult(1.0)
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    # backoff_s * 2^k, of which half to all is waited; never less.
    assert waits[0] >= 0.3 and waits[1] >= 0.05 and waits[2] >= 0.1


def test_a_refusal_is_not_tried_again(server, judge):
    runner = judge()
    codes = [400, 401, 404, 302]
    server.reply = lambda number, body: state(codes[number], "no such model")
    for sample, code in enumerate(codes):
        outcome = one(runner, sample)
        assert outcome.kind == "judge_error" and outcome.cause == f"HTTP {code}: no such model"
        assert len(server.bodies) == sample + 1, code


def test_a_slow_request_is_a_timeout_and_the_next_try_may_be_quick(server, judge):
    def reply(number: int, body: dict[str, Any]) -> Answer:
        if number == 0:
            server.release.wait(120)
        return completion("score: 2")

    server.reply = reply
    assert one(judge(timeout_s=1.0)) == RewardResult(2.0)


def test_the_deadline_ends_a_judgement_with_all_its_tries(server, judge):
    def reply(number: int, body: dict[str, Any]) -> Answer:
        server.release.wait(120)
        return completion("score: 2")

    server.reply = reply
    failed = one(judge(timeout_s=0.2, retries=1000, deadline_s=0.5))
    assert failed.kind == "judge_timeout" and "deadline_s=0.5" in failed.cause


def test_whatever_a_parser_of_ones_own_returns_or_raises_is_checked(server, judge, tmp_path):
    (tmp_path / "mine.py").write_text("def read(text):\n    return eval(text)\n")
    runner = judge(parser=f"{tmp_path / 'mine.py'}:read")
    expressions = ["7.0", "None", "True", "float('nan')", "10 ** 400", "'7'", "1 / 0"]
    server.reply = lambda number, body: completion(expressions[number])
    assert one(runner) == RewardResult(7.0)
    for sample, value in enumerate(expressions[1:], start=1):
        assert one(runner, sample).kind == "judge_invalid", value


def test_no_more_requests_run_at_a_time_than_allowed(server, judge):
    both = threading.Barrier(2)

    def reply(number: int, body: dict[str, Any]) -> Answer:
        both.wait(120)
        return completion("score: 1")

    server.reply = reply
    judge(max_concurrency=2).wait([rollout(i) for i in range(8)])
    assert server.most_at_once == 2


def test_requests_and_tries_again_keep_to_the_rate(server, judge):
    server.reply = lambda number, body: state(500) if number == 1 else completion("score: 1")
    # 150 a minute is one in 0.4 s.
    began = time.monotonic()
    judge(requests_per_minute=150).wait([rollout(i) for i in range(4)])
    assert len(server.times) == 5 and server.times[-1] - began >= 1.6


def test_the_key_is_sent_and_shown_nowhere_not_even_when_the_endpoint_repeats_it(server, judge, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-canary-123")
    server.reply = lambda number, body: state(401, "wrong key sk-canary-123")
    asked = judge(api_key_env="MY_JUDGE_KEY")
    failed = one(asked)
    assert server.keys == ["Bearer sk-canary-123"]
    assert failed.cause == "HTTP 401: wrong key <hidden>"
    server.reply = lambda number, body: completion("x" * 195 + " sk-canary-123")
    assert "canary" not in asked.wait([rollout(1)])[0].cause and "sk-" not in asked.wait([rollout(2)])[0].cause


def test_a_key_that_is_not_in_the_environment_is_refused_before_anything_is_asked(server):
    with pytest.raises(ConfigError, match="NOT_THERE"):
        spec_of(base_url=server.url, api_key_env="NOT_THERE")


def test_an_answer_of_many_megabytes_is_not_read_to_its_end(server, judge):
    server.reply = lambda number, body: state(200, "x" * 5_000_000)
    failed = one(judge())
    assert failed.kind == "judge_error" and "4,000,000 bytes" in failed.cause


def test_closing_gives_up_what_is_pending_and_ends_the_process(server, judge):
    begun = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Answer:
        begun.set()
        server.release.wait(120)
        return completion("score: 1")

    server.reply = reply
    asked = judge()
    asked.submit(rollout(0))
    assert begun.wait(120)
    pid = asked.processes._child.pid
    asked.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="closed"):
        asked.submit(rollout(1))


OWN_PARSER = """
import os, time

def read(text):
    if "exit" in text:
        os._exit(3)
    if "hang" in text:
        time.sleep(600)
    return 2.0
"""


@pytest.mark.parametrize(
    ("word", "kind", "cause"), [("exit", "judge_error", "code 3"), ("hang", "judge_timeout", "said nothing")]
)
def test_a_parser_that_ends_or_hangs_costs_only_the_answer_that_made_it(
    server, judge, tmp_path, monkeypatch, word, kind, cause
):
    monkeypatch.setattr("grpo_rl.rewards.runtime.judge_process.PATIENCE_S", 0.5)
    (tmp_path / "mine.py").write_text(OWN_PARSER)
    server.reply = lambda number, body: completion(body["messages"][-1]["content"])
    asked = judge(parser=f"{tmp_path / 'mine.py'}:read", template="{response}", max_concurrency=4, deadline_s=1.0)
    outcomes = asked.wait([rollout(k, word if k == 2 else "fine") for k in range(6)])
    assert [outcome for k, outcome in enumerate(outcomes) if k != 2] == [RewardResult(2.0)] * 5
    assert outcomes[2].kind == kind and cause in outcomes[2].cause


@pytest.mark.parametrize(("most", "num_hosts", "expected"), [(16, 3, [6, 5, 5]), (2, 3, [1, 1, 0]), (1, 1, [1])])
def test_all_hosts_together_ask_what_one_may(most: int, num_hosts: int, expected: list[int]) -> None:
    config = JudgeConfig(max_concurrency=most, requests_per_minute=30)
    shares = [share_of(config, place, num_hosts) for place in range(num_hosts)]
    assert [share.num_requests for share in shares] == expected
    # Requests in a second, over those that ask: 30 in a minute.
    assert sum(1 / share.interval_s for share in shares if share.num_requests) == pytest.approx(0.5)


# ---- rubrics -----------------------------------------------------------------------------------------

CRITERIA = """
- {name: right, criterion: The answer is right., weight: 3}
- It is short.
- {name: rude, description: It is rude., points: -1}
"""
MARKS = {"right": 1, "criterion_2": 0.5, "rude": 0.25}


def marking(number: int, body: dict[str, Any]) -> Answer:
    """Mark the criteria that the question has, as a judge does that reads it."""
    asked = [line[2:].partition(":")[0] for line in body["messages"][-1]["content"].splitlines() if line.startswith("- ")]
    return completion(f"Reasons {{x}}. {json.dumps({name: MARKS[name] for name in asked})}")


@pytest.mark.parametrize(
    ("settings", "score", "requests"),
    [
        ({}, (3 * 1 + 0.5 - 0.25) / 4, 1),
        ({"rubric_calls": "each"}, (3 * 1 + 0.5 - 0.25) / 4, 3),
        ({"rubric_aggregation": "mean"}, 0.75, 1),
        ({"rubric_aggregation": "all"}, 1.0, 1),
        ({"rubric_aggregation": "all", "rubric_pass": 0.6, "rubric_calls": "each"}, 0.0, 2),
    ],
)
@pytest.mark.parametrize("of_row", [False, True])
def test_a_rubric_is_marked_and_its_marks_make_the_score(server, judge, tmp_path, settings, score, requests, of_row):
    server.reply = marking
    lines = (
        CRITERIA if settings.get("rubric_aggregation", "weighted") == "weighted" else CRITERIA.rpartition("- {name: rude")[0]
    )
    names = list(MARKS)[: lines.count("- ")]
    (tmp_path / "rubric.yaml").write_text(lines)
    asked, item = judge(rubric="row" if of_row else str(tmp_path / "rubric.yaml"), **settings), rollout(0)
    item.prompt.extra_info.update({"rubric": yaml.safe_load(lines)} if of_row else {})
    (found,) = asked.wait([item])
    assert found.score == pytest.approx(score) and found.values == {name: MARKS[name] for name in names}
    assert len(server.bodies) == requests


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        ("[]\n", "a list of 1 to 100 criteria"),
        ("- {name: a}\n", "criterion 1 has no text"),
        ("- {text: a, weight: heavy}\n", "criterion 1 has the weight 'heavy'"),
        ("- {text: a, weight: -1}\n", "some criterion must have a weight above 0"),
        ("- {name: a, text: b}\n- {name: a, text: c}\n", "there once each, and without a slash: a"),
        ("not there.yaml", "No such file"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused_before_anything_is_asked(server, rubric, said):
    with pytest.raises(ConfigError, match=said):
        spec_of(base_url=server.url, rubric=rubric)


def test_a_row_without_a_rubric_has_no_score(server, judge):
    failed = one(judge(rubric="row"))
    assert failed.kind == "judge_invalid" and "extra_info.rubric of its row" in failed.cause and not server.bodies


# ---- the prompt, and the parsers of the answer ---------------------------------------------------------


def answered(text="an answer", ground_truth="4", messages=({"role": "user", "content": "2+2?"},)) -> Rollout:
    return Rollout(
        Prompt("p", (1,), "raw", "test", ground_truth, messages=messages), 0, (1,), (0.0,), "stop", ((0, 1),), text=text
    )


def test_a_template_is_filled_once_and_braces_of_a_response_stay_text():
    template = '{{"a": {other}}} {prompt}|{response}|{ground_truth}|{response}'
    filled = question(template, judge_sample(answered("{ground_truth}{prompt}{}\\1")))
    assert filled == '{{"a": {other}}} 2+2?|{ground_truth}{prompt}{}\\1|4|{ground_truth}{prompt}{}\\1'


def test_a_template_is_built_in_a_file_or_the_text_itself(tmp_path):
    (tmp_path / "ask.txt").write_text("rate {response}")
    assert load_template(str(tmp_path / "ask.txt")) == load_template("rate {response}") == "rate {response}"
    assert "[answer to judge]\nx\n" in question(load_template(None), judge_sample(answered("x")))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path / "none.txt"))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("score: 7", 7.0),
        ("Reasons.\n**Score: 8.5/10**", 8.5),
        ("score: 3\nNo, on reflection:\nSCORE = -2", -2.0),
        ("The score is hard to tell. score: 4.", 4.0),
        ("Score: **6**", 6.0),
        ("score: 5, and the score of others: unknown", 5.0),
        ("score: 1e5", None),
        ("score: 1,000", None),
        ("score: ٤", None),
        ("7", None),
        ("", None),
        ("score: " + "9" * 100, None),
    ],
)
def test_the_last_marked_score_is_read(answer, score):
    if score is None:
        with pytest.raises(ValueError, match="no `score: x`"):
            marked_score(answer)
    else:
        assert marked_score(answer) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 7}', 7.0),
        ('```json\n{"why": "{odd", "score": "6.5"}\n```', 6.5),
        ('{"score": 1} then {"score": 2}', 2.0),
        ('{"score": 3} and {"other": 4}', 3.0),
    ],
)
def test_a_number_is_read_from_the_last_object_that_has_the_key(answer, score):
    assert json_score(answer, "score") == score


@pytest.mark.parametrize(
    "answer", ['{"score": true}', '{"score": null}', '{"score": [1]}', '{"scor": 1}', '{"score": ' + "9" * 5000 + "}"]
)
def test_json_without_a_number_is_said_so(answer):
    with pytest.raises(ValueError, match="score"):
        json_score(answer, "score")


def test_a_parser_is_a_name_a_key_or_a_function(tmp_path):
    (tmp_path / "mine.py").write_text("def read(text):\n    return float(len(text))\n")
    assert parser_for("score")("score: 2") == 2.0
    assert parser_for("json:rating")('{"rating": 3}') == 3.0
    assert parser_for(f"{tmp_path / 'mine.py'}:read")("four") == 4.0
    with pytest.raises(ConfigError, match="no function 'other'"):
        parser_for(f"{tmp_path / 'mine.py'}:other")


# ---- what a judge may say against its scale, its limit and its own words ---------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            {
                "no idea": "no `score: x`",
                "score: 11": "11 is not within 0 to 10",
                "score: -1": "-1 is not within 0 to 10",
            },
        ),
        ({"template": "{response}"}, {f"score: {'9' * 40}": "is not within -3.40282e+38 to 3.40282e+38"}),
        ({"max_score": 5}, {"score: 6": "6 is not within"}),
    ],
)
def test_a_score_is_there_and_bounded_by_the_scale_of_the_built_in_question_and_by_float32(server, judge, settings, said):
    runner, answers = judge(**settings), list(said)
    server.reply = lambda number, body: completion(answers[number])
    for sample, answer in enumerate(answers):
        outcome = one(runner, sample)
        assert outcome.kind == "judge_invalid" and said[answer] in outcome.cause and answer in outcome.cause
        assert len(server.bodies) == sample + 1, answer


@pytest.mark.parametrize(("temperature", "requests"), [(0.0, 1), (0.7, 3)])
def test_an_answer_that_was_cut_or_is_no_text_is_no_score(server, judge, temperature, requests):
    runner = judge(temperature=temperature, retries=2, max_tokens=7)
    for choice in ({"message": {"content": "score: 1"}, "finish_reason": "length"}, {"message": {"content": None}}):
        earlier_requests = len(server.bodies)
        answer = json.dumps({"choices": [choice]}).encode()
        server.reply = lambda number, body, answer=answer: (200, answer, {})
        outcome = one(runner, sample=earlier_requests)
        assert outcome.kind == "judge_error" and "cannot be read" in outcome.cause, choice
        assert ("cut at reward.judge.max_tokens=7" in outcome.cause) == ("finish_reason" in choice)
        assert len(server.bodies) == earlier_requests + requests, choice


JUDGED: dict[str, tuple[float, float, float] | str] = {
    'It says {"right": 1, "criterion_2": 1, "rude": 0}. {"right": 0, "criterion_2": 0, "rude": 1}': (0, 0, 1),
    'It says {"rude": 0}. So {"right": 0, "criterion_2": 0}': "its last JSON object has no",
    'It says {"right": 1, "criterion_2": 1, "rude": 0}. So {"right": 0}': "its last JSON object has no",
    '{"marks": {"right": 0.5, "criterion_2": 0, "rude": 1}, "sure": {"much": 1}}': (0.5, 0, 1),
    '{"right": 1, "criterion_2": 1}': "its last JSON object has no 'rude'",
    '{"right": 2, "criterion_2": 1, "rude": 0}': "2 is not within 0 to 1",
}


def test_all_marks_of_a_rubric_are_within_its_range_and_come_from_the_last_object(server, judge):
    runner, answers = judge(rubric=CRITERIA), list(JUDGED)
    server.reply = lambda number, body: completion(answers[number])
    for sample, (answer, expected) in enumerate(JUDGED.items()):
        outcome = one(runner, sample)
        if isinstance(expected, str):
            assert outcome.kind == "judge_invalid" and expected in outcome.cause, answer
        else:
            assert tuple(outcome.values.values()) == expected, answer


@pytest.mark.parametrize(
    "unit", ["{", '{"a":"', "score: ", "score", "1.", '{"score":', "-", "score**", "[", " ", '{"scor": 1}']
)
@pytest.mark.parametrize("parser", ["score", "json:score"])
def test_a_parser_reads_an_answer_of_megabytes_in_time_that_grows_with_its_length(unit, parser):
    started = time.process_time()
    with pytest.raises(ValueError, match="it has no"):
        parser_for(parser)("score" + unit * (3_900_000 // len(unit)))
    assert time.process_time() - started < 5.0
