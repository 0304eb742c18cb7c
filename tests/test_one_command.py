"""`grpo_fn COMMAND`: one name for all, the same words for the same things, and help without torch."""

import subprocess
import sys

import pytest

from grpo_fn import __main__ as one_command
from grpo_fn import run
from grpo_fn.command_line import COMMANDS, CommandParser, exit_code
from grpo_fn.core.display_text import suggest_name

MODULES = {each.word: each.module for group in COMMANDS.values() for each in group}
WRITERS = {"run", "eval", "report", "lens", "export", "pair", "sweep", "tiny-model", "import"}  # they have --quiet
HELP = """
import sys
from grpo_fn.__main__ import main
sys.argv[0] = "/bin/grpo_fn"
for word in sys.argv[1:]:
    for flag in ("--help", "--no_such_flag"):
        try:
            code = main([word, flag])
        except SystemExit as end:
            code = end.code
        print("END", word, flag, code, "torch" in sys.modules)
"""


def parser_of(word: str) -> CommandParser:
    return one_command.command_module(MODULES[word]).flags()


def test_help_and_a_wrong_flag_of_every_command_come_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *MODULES], capture_output=True, text=True, timeout=100)
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("END ")]
    expected = [
        [word, *rest] for word in MODULES for rest in (("--help", "0", "False"), ("--no_such_flag", "2", "False"))
    ]
    assert ends == expected, done.stderr
    assert all(f"usage: grpo_fn {word} " in done.stdout for word in MODULES)


def test_the_help_of_all_is_one_screen_and_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= MODULES.keys()


def test_a_command_that_is_none_is_refused_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_command.main(["swep", "run/math.gin"]) == 2
    assert capsys.readouterr().err.endswith("did you mean sweep?\n")


@pytest.mark.parametrize("word", MODULES)
def test_a_name_means_the_same_in_every_command(word: str) -> None:
    actions = parser_of(word)._option_string_actions
    for short, long in (
        ("--set", "--gin_param"),
        ("--set", "--override"),
        ("--out", "--run_dir"),
        ("--out", "--output"),
    ):
        if long in actions:
            assert actions[short] is actions[long]
    assert ("--quiet" in actions) == (word in WRITERS)
    assert "--version" in actions


def test_gin_files_stand_anywhere_and_dashes_are_underscores() -> None:
    args = run.flags().parse_args(
        ["run/math.gin", "--set", "A=1", "algo/dapo.gin", "--dry-run", "--gin-param=B=x-y", "--gin_file", "first.gin"]
    )
    assert args.gin_file == ["first.gin", "run/math.gin", "algo/dapo.gin"]
    assert (args.gin_param, args.dry_run) == (["A=1", "B=x-y"], True)
    parser = run.flags()
    assert parser.parse_args(["one.gin"]).gin_file == ["one.gin"]
    assert parser.parse_args(["two.gin"]).gin_file == ["two.gin"]  # nothing is left of the call before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no gin file, expected one, such as run/gsm8k.gin; python -m grpo_fn.run --help lists the flags"),
        (["run/math.gin", "--gin_parm", "A=1"], "did you mean --gin_param?"),
        (["run/math.gin", "--ranks", "x"], "argument --ranks: invalid int value: 'x'; python -m grpo_fn.run --help"),
    ],
)
def test_bad_flags_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_quiet_prints_nothing_but_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        print("written to DIR")
        raise ValueError("got DIR, expected a free name")

    assert exit_code(work, interrupted="", quiet=True) == 2
    assert tuple(capsys.readouterr()) == ("", "error: got DIR, expected a free name\n")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("run/nothing.gin", None),
        ("run/gsm8.gin", "run/gsm8k.gin"),
        ("rum/gsm8k.gin", "run/gsm8k.gin"),
        ("eval/gsm8k.gim", "eval/gsm8k.gin"),
        ("math", "run/math.gin"),
    ],
)
def test_a_gin_file_is_suggested_when_its_own_name_is_near(name: str, near: str | None) -> None:
    choices = ["run/math.gin", "run/gsm8k.gin", "eval/gsm8k.gin", "algo/dapo.gin", "base.gin"]
    assert suggest_name(name, choices) == (f"; did you mean {near}?" if near else "")


@pytest.mark.parametrize("shell", one_command.SHELLS)
def test_a_completion_script_completes_commands_flags_and_gin_files(shell: str) -> None:
    commands = {each.word: each for group in COMMANDS.values() for each in group}
    script = one_command.completion_script(commands, "bash")
    if shell == "zsh":
        assert one_command.completion_script(commands, "zsh").splitlines()[1:] == script.splitlines()
        return
    tries = {"swe": "sweep", "run --dry": "--dry_run", "run run/gsm": "run/gsm8k.gin"}
    for typed, completed in tries.items():
        words = " ".join(["grpo_fn", *typed.split()])
        probe = f'COMP_WORDS=({words}); COMP_CWORD={len(typed.split())}; _grpo_fn; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{probe}"], capture_output=True, text=True, timeout=20)
        assert done.stdout.split() == [completed], done.stderr
