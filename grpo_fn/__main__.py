"""grpo_fn COMMAND: every command behind one name. A command's module is imported when it is the one that is run."""

import sys
from collections.abc import Sequence
from importlib import import_module, util
from types import ModuleType

from grpo_fn.command_line import COMMANDS, EXIT_BAD_INPUT, Command, package_version
from grpo_fn.core.display_text import suggest_name

SHELLS = ("bash", "zsh")
# zsh runs the function for bash. Words that are no flag are files, and for gin files those of the package, too.
COMPLETION = """\
_grpo_fn() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands}"
  elif [ "${{word#-}}" != "$word" ]; then
    case "$command" in
{flags}
    esac
  else
    case "$command" in
      {takes_gin}) words="{gin}" ;;
    esac
    COMPREPLY=($(compgen -f -- "$word"))
  fi
  COMPREPLY+=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _grpo_fn grpo_fn"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, with the other words; returns its exit code."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    commands = {each.word: each for group in COMMANDS.values() for each in group}
    match words:
        case [] | ["-h" | "--help" | "help", *_]:
            print(help_text())
        case ["--version"]:
            print(package_version())
        case ["completion", ("bash" | "zsh") as shell]:
            print(completion_script(commands, shell))
        case ["completion", *rest]:
            return print_refusal(f"completion: got {' '.join(rest) or 'nothing'}, expected {' or '.join(SHELLS)}")
        case [word, *rest] if word in commands:
            return command_module(commands[word].module).main(rest)
        case [word, *_]:
            return print_refusal(
                f"got {word!r}, expected a command: {', '.join(commands)}{suggest_name(word, commands)}"
            )
    return 0


def print_refusal(text: str) -> int:
    """Print what is wrong; the exit code of bad input."""
    print(f"error: {text}", file=sys.stderr)
    return EXIT_BAD_INPUT


def help_text() -> str:
    """The commands in their groups, on one screen."""
    lines = ["usage: grpo_fn COMMAND ...    (grpo_fn COMMAND --help lists its flags)"]
    for title, group in COMMANDS.items():
        lines += ["", title, *(f"  {each.word:11} {each.summary}" for each in group)]
    return "\n".join(
        [
            *lines,
            "",
            "shell",
            '  completion  print completions for bash or zsh: eval "$(grpo_fn completion bash)"',
            "",
            "first steps",
            "  grpo_fn tiny-model --out tiny --chat_template",
            "  grpo_fn run run/gsm8k.gin --set MODEL=tiny --set DATA=DIR --dry_run",
        ]
    )


def command_module(name: str) -> ModuleType:
    """The module with the `flags` and the `main` of a command, or of the package that is one."""
    is_package = bool(util.find_spec(name).submodule_search_locations)
    return import_module(f"{name}.__main__" if is_package else name)


def completion_script(commands: dict[str, Command], shell: str) -> str:
    """A script for the shell that completes commands, their flags, and gin files of the package or of the folder."""
    from grpo_fn.config.parse import GIN_FOLDER

    parsers = {word: command_module(each.module).flags() for word, each in commands.items()}
    options = {
        word: [flag for flag in parser._option_string_actions if flag.startswith("--")]
        for word, parser in parsers.items()
    }
    script = COMPLETION.format(
        commands=" ".join([*commands, "completion"]),
        flags="\n".join(f'      {word}) words="{" ".join(flags)}" ;;' for word, flags in options.items()),
        takes_gin="|".join(word for word, flags in options.items() if "--gin_file" in flags),
        gin=" ".join(sorted(str(path.relative_to(GIN_FOLDER)) for path in GIN_FOLDER.rglob("*.gin"))),
    )
    return f"autoload -U bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


if __name__ == "__main__":
    sys.exit(main())
