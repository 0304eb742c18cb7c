"""The commands of the README, the docs and the recipes: which lines and code spans they are, and what a shell reads.

A command is a line of a block that is indented or fenced as sh, or a code span that begins with the name of a program
and says something to it. Whatever else stands in a block has to be fenced, and fenced as something.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("sh", "bash", "shell", "console")
FENCE = re.compile(r"^ *```(\S*).*$")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
# What makes a code span a command, and a block that is not fenced as sh one that should be. Names of scripts do, too.
OURS = ("python", "python3", "python3.11", "pytest", "make", "torchrun", "tensorboard", "mkdocs", "ruff")
OTHERS = ("pip", "pip3", "uv", "conda", "git", "docker", "kubectl", "sbatch", "srun", "scancel", "scontrol", "squeue")
OTHERS += (
    "nvidia-smi",
    "wandb",
    "trackio",
    "vllm",
    "transformers",
    "lm_eval",
    "hf",
    "huggingface-cli",
    "accelerate",
    "source",
    ".",
    "export",
    "cd",
    "echo",
)
OTHERS += ("cat", "tail", "apt-get", "apt", "curl", "wget", "ssh", "bash", "sh", "dmesg", "kill", "rm", "mkdir", "cp")


class Command(NamedTuple):
    """A command as it stands on a page."""

    page: str  # from the root
    line: int  # from 1
    text: str
    block: bool  # and not a code span


class Stage(NamedTuple):
    """A program of a pipeline."""

    env: dict[str, str]
    argv: list[str]
    read: str  # standard input: a file, "|" for the stage before, "" for nothing
    write: str  # standard output: a file, "|" for the next stage, "" for the terminal


class Block(NamedTuple):
    line: int
    language: str | None  # None where it is only indented
    lines: list[str]


def pages() -> list[Path]:
    """All pages that may have commands."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]


def commands(page: Path) -> list[Command]:
    """Every command of a page once, in its order."""
    text = page.read_text()
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    found = [Command(name, line, said, True) for block in blocks(text) if shell(block) for line, said in joined(block)]
    found += [Command(name, line, said, False) for line, said in spans(text) if is_command(said)]
    once: dict[str, Command] = {}
    for each in sorted(found, key=lambda each: (each.line, not each.block)):
        once.setdefault(each.text, each)
    return [*once.values()]


def shell(block: Block) -> bool:
    """Whether it holds commands."""
    return block.language is None or block.language in SHELL


def blocks(text: str) -> Iterator[Block]:
    """The blocks of code: fenced ones, and those that are indented by four spaces after an empty line."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if fence := FENCE.match(lines[at]):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), len(lines))
            yield Block(at + 2, fence[1], lines[at + 1 : end])
            at = end + 1
        elif lines[at].startswith("    ") and at and not lines[at - 1].strip():
            end = next((i for i in range(at, len(lines)) if lines[i].strip() and lines[i][:4] != "    "), len(lines))
            yield Block(at + 1, None, [line[4:] for line in lines[at:end]])
            at = end
        else:
            at += 1


def joined(block: Block) -> Iterator[tuple[int, str]]:
    """Its commands with the line each begins at; a line that ends in a backslash or a pipe goes on in the next one."""
    begun, said = 0, ""
    for number, line in enumerate(block.lines, start=block.line):
        if not said and (not line.strip() or line.lstrip().startswith("#")):
            continue
        begun = begun if said else number
        said = f"{said} {line.strip().removeprefix('$ ')}".strip()
        if said.endswith("\\"):
            said = said[:-1].rstrip()
        elif not said.endswith("|"):
            yield begun, said
            said = ""
    assert not said, f"line {begun} goes on after the end of its block: {said}"


def spans(text: str) -> Iterator[tuple[int, str]]:
    """The code spans outside of blocks, a line end within one as a space, with their lines."""
    lines = text.splitlines()
    for block in blocks(text):
        for i in range(block.line - 1, block.line - 1 + len(block.lines)):
            lines[i] = ""
    plain = "\n".join("" if FENCE.match(line) else line for line in lines)
    for found in re.finditer(r"(?<!`)`(?!`)((?:[^`\n]|\n(?!\s*\n))+)`(?!`)", plain):
        yield plain.count("\n", 0, found.start()) + 1, " ".join(found[1].split()).replace("\\|", "|")


def is_command(span: str) -> bool:
    """Whether a code span says something to a program: one word is a name, if it is not that of a script to start."""
    words = span.split()
    while words and ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if not words or not is_program(words[0]):
        return False
    says = len(words) > 1 and words[-1] not in ("-m", "-c")
    return says or (words[0].endswith(".sh") and "/" in words[0])


def is_program(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in OURS + OTHERS or word.endswith((".sh", ".sbatch"))


def unfenced(text: str) -> Iterator[tuple[int, str]]:
    """Lines of other blocks that look like commands, and of unfenced ones that do not."""
    for block in blocks(text):
        for number, line in enumerate(block.lines, start=block.line):
            words = line.split()
            program = len(words) > 1 and line == line.lstrip() and is_program(words[0]) and words[0] != "."
            if program and not shell(block):
                yield number, line
        if block.language is None:
            yield from ((number, said) for number, said in joined(block) if not is_program(first(said)))


def first(said: str) -> str:
    """The first word that is no assignment."""
    return next((word for word in said.split() if not ASSIGNMENT.fullmatch(word)), "")


def pipelines(said: str) -> list[list[Stage]]:
    """What a shell would start, one after the other; `...` and optional parts in brackets are left out."""
    plain = re.sub(r"\[[A-Z] \.\.\.\]| \.\.\.(?= |$)| \(the same flags\)", "", said)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    tokens = list(lexer)
    found: list[list[Stage]] = [[]]
    for part, end in parted(tokens):
        found[-1].append(stage(part, piped=bool(found[-1]), pipes=end == "|"))
        if end in ("&&", ";"):
            found.append([])
    return [each for each in found if each]


def parted(tokens: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """The words between `|`, `&&` and `;`, and which of them ends them."""
    part: list[str] = []
    for token in tokens:
        if token in ("|", "&&", ";"):
            yield part, token
            part = []
        else:
            part.append(token)
    if part:
        yield part, ""


def stage(words: Sequence[str], *, piped: bool, pipes: bool) -> Stage:
    """Assignments, arguments and redirections of a program."""
    env: dict[str, str] = {}
    argv: list[str] = []
    files = {"<": "|" if piped else "", ">": "|" if pipes else ""}
    words = list(words)
    while words:
        word = words.pop(0)
        if word in files:
            files[word] = words.pop(0)
        elif not argv and ASSIGNMENT.fullmatch(word):
            name, _, env[name] = word.partition("=")
        else:
            assert not set(word) <= set("|&;<>"), f"no rule for {word!r}"
            argv.append(word)
    return Stage(env, argv, files["<"], files[">"])
