"""Names of the package: one name for one thing, so that grep finds it, and no function called by a bare participle."""

import ast
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Names that several modules give to what is the same thing in each, and why.
SHARED = {
    "main": "every command has one",
    "flags": "the command line of each command",
    "task": "a task's module has one: gin binds @rows.task",
    "environment": "an environment's module has one: gin binds @tool_use.environment()",
    "start": "the two functions of every environment",
    "step": "the two functions of every environment",
    "train": "grpo_fn.train is the call from Python, train.train the root that gin binds",
    "evaluate": "grpo_fn.evaluate is the call from Python, that of trainer.evaluation measures two samplers",
}
# Participles that are the field's own names, and why.
TERMS = {"boxed": "the reward for \\boxed{...}", "split": "jax.random.split"}
IRREGULAR = {
    *("begun", "bound", "built", "chosen", "cut", "done", "drawn", "found", "given", "gone", "heard", "held", "hidden"),
    *("kept", "known", "left", "lost", "made", "meant", "met", "put", "said", "seen", "sent", "set", "shown", "split"),
    *("spread", "taken", "told", "worn", "written"),
}
# Metaphors for what has a standard term (reported, received, no rank, space), in strings and comments of the package.
# The same in its identifiers and everywhere else, also as a word inside snake_case.
PLAIN = re.compile(
    r"(?<![a-z])(told|tells?|telling|heard|hears?|hearing|nobodys?|somebodys?|whoever|voices?|houses?|rooms?"
    r"|came[\s_]of|in[\s_]vain|nonsense)(?![a-z])",
    re.IGNORECASE,
)
PLACES = (
    "tests/**/*.py",
    "tests/**/*.sh",
    "tools/**/*.py",
    "tools/**/*.sh",
    "docs/**/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "gin/**/*.gin",
)
# Files in which such a word is meant, and why.
MEANT = {
    "tests/arch/test_names.py": "the words themselves",
}


def public_definitions() -> dict[str, list[tuple[str, bool]]]:
    """Name -> (file, whether it is a function) of everything public at the top level of a module."""
    found = defaultdict(list)
    for path in sorted((ROOT / "grpo_fn").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append((str(path.relative_to(ROOT)), isinstance(node, ast.FunctionDef)))
    return found


def public_methods() -> dict[str, str]:
    """File and class of every public method that is no property, by `file:class.name`."""
    found = {}
    for path in sorted((ROOT / "grpo_fn").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and not one.decorator_list:
                        found[f"{path.relative_to(ROOT)}:{node.name}.{one.name}"] = one.name
    return found


def is_participle(name: str) -> bool:
    return name in IRREGULAR or (name.endswith("ed") and "_" not in name)


def test_a_public_name_is_unique_in_the_package() -> None:
    found = public_definitions()
    assert len(found) > 1000
    doubled = {name: [file for file, _ in places] for name, places in found.items() if len(places) > 1}
    assert not {name: files for name, files in doubled.items() if name not in SHARED}
    assert doubled.keys() >= SHARED.keys(), "an exception that is none any more"


def test_no_public_function_or_method_is_a_bare_participle() -> None:
    functions = {name for name, places in public_definitions().items() if any(function for _, function in places)}
    participles = {name for name in functions if is_participle(name)}
    assert participles == TERMS.keys()
    methods = {place for place, name in public_methods().items() if is_participle(name)}
    assert not methods


def test_docstrings_comments_messages_and_identifiers_are_without_private_words() -> None:
    found = []
    for path in sorted((ROOT / "grpo_fn").rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                seen = token.type in (tokenize.STRING, tokenize.COMMENT, tokenize.NAME)
                if seen and (word := PLAIN.search(token.string)):
                    found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {word[0]}")
    assert not found, "\n".join(found)


def test_tests_tools_pages_and_gin_files_are_without_private_words() -> None:
    paths = sorted({path for place in PLACES for path in ROOT.glob(place)})
    assert len(paths) > 300
    found = defaultdict(list)
    for path in paths:
        text = path.read_text()
        for word in PLAIN.finditer(text):
            found[str(path.relative_to(ROOT))].append(f"{text.count(chr(10), 0, word.start()) + 1}: {word[0]}")
    left = [f"{file}:{line}" for file, lines in found.items() if file not in MEANT for line in lines]
    assert not left, "\n".join(left)
    assert found.keys() >= MEANT.keys(), "an exception that is none any more"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Test folders are no packages: of two modules of one name pytest imports one and refuses the other.

    Those of the real vLLM are run by themselves.
    """
    places: dict[str, list[str]] = {}
    for path in sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != ROOT / "tests" / "vllm"):
        places.setdefault(path.name, []).append(str(path.parent.relative_to(ROOT)))
    doubled = [f"{name} is in {' and '.join(folders)}" for name, folders in places.items() if len(folders) > 1]
    assert places
    assert not doubled, "\n".join(doubled)
