"""The commands of the README, the docs, the recipes and the heads of files: where they stand, and what a shell reads.

A command is a line of a block that is indented or fenced as sh, or a code span that begins with the name of a program
and has an argument for it. Whatever else stands in a block has to be fenced, and fenced as something.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHELL = (None, "sh", "bash")
FENCE = re.compile(r"^ *```(\S*).*$")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
PROGRAMS = {
    *("python", "python3", "python3.11", "pytest", "make", "torchrun", "tensorboard", "pip", "source", "."),
    *("docker", "kubectl", "sbatch", "srun", "scancel", "scontrol", "nvidia-smi", "wandb", "trackio", "touch"),
    *("grpo_fn", "transformers", "vllm", "lm_eval", "echo", "tail"),
}


class Command(NamedTuple):
    """A command as it stands on a page."""

    page: str  # from the root
    line: int  # from 1
    text: str


class Block(NamedTuple):
    """A block of code."""

    line: int
    language: str | None  # None where it is only indented
    lines: list[str]


def pages() -> list[Path]:
    """All pages that may have commands."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of code: fenced ones, and those that are indented by four spaces after an empty line."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        if fence := FENCE.match(lines[at]):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), len(lines))
            yield Block(at + 2, fence[1], lines[at + 1 : end])
            at = end
        elif lines[at].startswith("    ") and at and not lines[at - 1].strip():
            end = next((i for i in range(at, len(lines)) if lines[i].strip() and lines[i][:4] != "    "), len(lines))
            yield Block(at + 1, None, [line[4:] for line in lines[at:end]])
            at = end - 1
        at += 1


def joined(block: Block) -> Iterator[tuple[int, str]]:
    """Its commands with their first lines; one that ends in a backslash or a pipe continues on the next line."""
    first, text = 0, ""
    for number, line in enumerate(block.lines, start=block.line):
        if not text and (not line.strip() or line.lstrip().startswith("#")):
            continue
        first = first if text else number
        text = f"{text} {line.strip()}".strip()
        if text.endswith("\\"):
            text = text[:-1].rstrip()
        elif not text.endswith("|"):
            yield first, text
            text = ""
    assert not text, f"line {first} continues after the end of its block: {text}"


def is_program(text: str) -> bool:
    """Whether a text begins with a program, assignments aside, or with the path of a script."""
    word = next((word for word in text.split() if not ASSIGNMENT.fullmatch(word)), "")
    return word.rsplit("/", 1)[-1] in PROGRAMS or word.endswith((".sh", ".sbatch"))


def commands(page: Path) -> list[Command]:
    """Every command of a page in its order, those of code spans too: one word is a name, and no command."""
    text, name = page.read_text(), str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = text.splitlines()
    found: list[Command] = []
    for block in blocks(text):
        if block.language in SHELL:
            found += [Command(name, line, command) for line, command in joined(block)]
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = [""] * len(block.lines)
    plain = "\n".join("" if FENCE.match(line) else line for line in lines)
    for span in re.finditer(r"(?<!`)`(?!`)((?:[^`\n]|\n(?!\s*\n))+)`(?!`)", plain):
        command = " ".join(span[1].split()).replace("\\|", "|")
        if is_program(command) and len(command.split()) > 1 and command.split()[-1] not in ("-m", "-c"):
            found.append(Command(name, plain.count("\n", 0, span.start()) + 1, command))
    return sorted(found, key=lambda each: each.line)


def head_commands(path: Path) -> Iterator[Command]:
    """The commands in the first comment or docstring of a file; two spaces part them from what is said about them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    head = [line[2:] for line in lines[: next((i for i, line in enumerate(lines) if line[:1] != "#"), len(lines))]]
    if path.suffix == ".py":
        head = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    for i, line in enumerate(head):
        if is_program(line) and (path.suffix == ".py" or line[:2] == "  "):
            end = next((j for j in range(i, len(head)) if not head[j].endswith("\\")), i)
            texts = [re.sub(r"(?<=\S)\s{2,}.*", "", text.strip()) for text in head[i : end + 1]]
            ((_, text),) = joined(Block(i + 1, "sh", texts))
            text = re.sub(r"\[(?:[A-Z]+ \.\.\.|further [^]]*|[a-z|]+ \.\.\.)\]|,\.\.\.", "", text)
            yield Command(str(path.relative_to(ROOT)), i + 1, re.sub(r"[\[\]](?![\"'])", "", text))


def programs(text: str) -> list[list[str]]:
    """The arguments of each program that a shell would start; `...` and optional parts in brackets are left out."""
    plain = re.sub(r"\[[A-Z] \.\.\.\]| \.\.\.(?= |$)| \(the same flags\)", "", text)
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    starts: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in ("|", "&&", ";"):
            starts.append([])
        elif word in ("<", ">"):
            next(words)
        elif starts[-1] or not ASSIGNMENT.fullmatch(word):
            starts[-1].append(word)
    return starts
