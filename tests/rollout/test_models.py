"""Models are found or made whole, once, by whoever comes first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agents.models import resolve, resolve_model
from agents.models.__main__ import main
from agents.models.arithmetic import TASK, make_tokenizer, wrong_answer
from agents.rollout.environments import open_environment
from tests.rollout.world import write_model_files
from whimbrel.errors import UsageError
from whimbrel.spec import load_run_file

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def test_a_model_folder_is_used_as_it_is(tmp_path: Path) -> None:
    write_model_files(tmp_path).save_pretrained(tmp_path)
    assert resolve_model(str(tmp_path), tmp_path / "home") == tmp_path.resolve()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nowhere/model", "no folder"),
        ("builtin:arithmetics", "Did you mean builtin:arithmetic"),
        ("{tmp}", "no config.json"),
    ],
)
def test_what_is_no_model_is_a_usage_error_with_a_hint(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(model.format(tmp=tmp_path), tmp_path / "home")
    assert words in str(caught.value)
    assert caught.value.hint


def test_a_builtin_model_is_made_once_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(folder: Path, tell: Callable[[str], None]) -> None:
        built.append(folder)
        assert not (tmp_path / "models" / "arithmetic").exists()
        (folder / "config.json").write_text("{}")
        tell("made")

    monkeypatch.setitem(resolve.BUILDERS, "arithmetic", build)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("builtin:arithmetic", tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(built) == 1
    assert found == [tmp_path / "models" / "arithmetic"] * 4
    assert (found[0] / "config.json").exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(folder: Path, _tell: Callable[[str], None]) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("out of memory")

    monkeypatch.setitem(resolve.BUILDERS, "arithmetic", build)
    with pytest.raises(RuntimeError):
        resolve_model("builtin:arithmetic", tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".arithmetic.lock"]


def test_the_tokenizer_gives_every_text_back_and_keeps_prompts_short(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("State the final answer", "12 + 7 = -3", "Ünïcode ✓\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = open_environment(TASK, 1).prompt(0)
    tokens = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert len(tokens) <= 10
    assert len(tokenizer.encode("123")) == 3


def test_wrong_answers_are_wrong() -> None:
    chance = random.Random(1)
    environment = open_environment(TASK, 1)
    for index in range(100):
        answer = environment.prompt(index).answer
        assert environment.score(index, wrong_answer(int(answer), chance)) < 1.0


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "arithmetik", str(tmp_path / "m")]) == 2
    assert "Did you mean builtin:arithmetic" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize("name", ["quickstart.toml", "python-environment.toml"])
def test_the_examples_run_files_have_working_environments(name: str) -> None:
    spec = load_run_file(EXAMPLES / name)
    environment = open_environment(spec.environment, spec.seed)
    try:
        assert environment.score(0, environment.prompt(0).answer) == 1.0
    finally:
        environment.close()
