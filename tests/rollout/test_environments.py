"""Environments: the same prompt anywhere; a failure of the environment is never a reward."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.rollout.environments import open_environment
from agents.rollout.environments.__main__ import main
from agents.rollout.environments.procedural import extract_answer
from agents.rollout.environments.user import UserEnvironment
from whimbrel.errors import EnvironmentFailed, UsageError
from whimbrel.spec import EnvironmentSpec

CODE = """
import os, time

class Echo:
    def __init__(self, word, seed):
        self.word, self.seed = word, seed
        print("user code may print")

    def prompt(self, index):
        if index == 13:
            raise ValueError("thirteen")
        return {"prompt": f"{self.word} {self.seed} {index}", "answer": str(index)}

    def reward(self, index, completion):
        if completion == "hang":
            time.sleep(60)
        if completion == "crash":
            os._exit(3)
        if completion == "none":
            return None
        return float(completion == str(index))

def make(word="say", seed=0):
    return Echo(word, seed)

def wrong():
    return object()
"""


@pytest.fixture
def entry(tmp_path: Path) -> str:
    path = tmp_path / "echo_environment.py"
    path.write_text(CODE)
    return str(path)


def user(entry: str, function: str = "make", timeout_s: float = 10, **params: object) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate(
        {"type": "python", "entry": f"{entry}:{function}", "params": params, "timeout_s": timeout_s}
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), index=st.integers(0, 2**40))
def test_the_same_index_is_the_same_prompt_anywhere(seed: int, index: int) -> None:
    spec = EnvironmentSpec(task="chain_sum")
    one, other = open_environment(spec, seed), open_environment(spec, seed)
    other.prompt(index + 1)
    assert one.prompt(index) == other.prompt(index)
    assert one.score(index, one.prompt(index).answer) == 1.0
    assert other.score(index, "no number") == 0.0


def test_other_seeds_and_indices_make_other_prompts() -> None:
    spec = EnvironmentSpec(task="chain_sum")
    first = open_environment(spec, 1)
    texts = {first.prompt(index).text for index in range(50)}
    assert len(texts) > 45
    assert first.prompt(3) != open_environment(spec, 2).prompt(3)


@pytest.mark.parametrize(
    "task", ["spell_backward", "letter_counting", "number_sorting", "basic_arithmetic", "gcd", "maze"]
)
def test_many_tasks_work_unchanged(task: str) -> None:
    environment = open_environment(EnvironmentSpec(task=task, system_prompt="Be brief."), 5)
    prompt = environment.prompt(10**9)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert environment.score(10**9, f"<answer>{prompt.answer}</answer>") == 1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"task": "chain_sun"}, "Did you mean chain_sum"),
        ({"task": "chain_sum", "params": {"max_term": 2}}, "Did you mean max_terms"),
        ({"task": "chain_sum", "params": {"min_terms": 9}}, "max_terms must be"),
        ({"task": "chain_sum", "params": {"max_terms": "two"}}, "does not accept"),
        ({"task": "chain_sum", "params": {"seed": 2}}, "cannot be set"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_with_a_hint(spec: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_environment(EnvironmentSpec.model_validate(spec), 0)
    assert words in str(caught.value)
    assert caught.value.hint


def test_the_answer_is_the_last_element_or_the_whole_text() -> None:
    assert extract_answer("  7 ") == "7"
    assert extract_answer("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert extract_answer("<answer>3") == "<answer>3"


def test_user_code_gives_prompts_and_rewards(entry: str) -> None:
    environment = open_environment(user(entry, word="sing"), 9)
    try:
        assert environment.prompt(4).text == "sing 9 4"
        assert environment.score(4, "4") == 1.0
        assert environment.score(4, "5") == 0.0
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("completion", "words"), [("hang", "longer than"), ("crash", "exit code 3"), ("none", "not a finite")]
)
def test_a_failing_environment_is_no_reward_and_recovers(entry: str, completion: str, words: str) -> None:
    environment = UserEnvironment(user(entry, timeout_s=1.0), 0)
    try:
        started = time.monotonic()
        with pytest.raises(EnvironmentFailed, match=words):
            environment.score(1, completion)
        assert time.monotonic() - started < 5
        assert environment.score(1, "1") == 1.0
        with pytest.raises(EnvironmentFailed, match="thirteen"):
            environment.prompt(13)
    finally:
        environment.close()


def test_a_killed_environment_leaves_no_process(entry: str) -> None:
    environment = UserEnvironment(user(entry), 0)
    assert environment._child is not None
    pid = environment._child.pid
    environment.close()
    environment.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("function", "words"), [("nothing", "nothing"), ("wrong", "no method prompt"), ("make", "unexpected")]
)
def test_code_that_cannot_be_loaded_is_a_usage_error(entry: str, function: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        UserEnvironment(user(entry, function, **({"colour": 1} if function == "make" else {})), 0)


def test_check_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", '{"name": "a", "model": "m", "environment": {"task": "chain_sum"}}']) == 0
    assert "reasoning-gym task chain_sum" in capsys.readouterr().out
    assert main(["check", '{"name": "a", "model": "m", "environment": {"task": "chain"}}']) == 2
    assert "no task named chain" in capsys.readouterr().err
