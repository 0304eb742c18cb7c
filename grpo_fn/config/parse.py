"""gin files and command-line parameters to Bindings. The only file that imports gin, and for its grammar alone.

A text is read first (`read_gin`); then its names become functions: as the source of their modules declares them
(`declared_bindings`, without importing a module), or themselves (`imported_bindings`).
"""

import importlib
import re
import sys
import tokenize
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from gin.config_parser import (
    BindingStatement,
    BlockDeclaration,
    ConfigParser,
    ImportStatement,
    IncludeStatement,
    ParserDelegate,
)

from grpo_fn.config.resolve import (
    Bindings,
    Macro,
    Reference,
    bad_names,
    comma_list,
    complain,
    full_name,
    functions,
    knobs_of,
    search_folder,
    signature,
)
from grpo_fn.config.source import Sources, check_module, module_place, named_attribute, takes_text
from grpo_fn.core.display_text import suggest_name

PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package in a wheel, beside it in a checkout.
GIN_FOLDER = PACKAGE / "gin" if (PACKAGE / "gin").is_dir() else PACKAGE.parent / "gin"
DYNAMIC = "__gin__.dynamic_registration"
DYNAMIC_LINE = "from __gin__ import dynamic_registration"
NAME = re.compile(r"([A-Za-z_]\w*/)*([A-Za-z_]\w*\.)*[A-Za-z_]\w*")
OPENERS = ("'", '"', "[", "{", "(", "@", "%")  # a value that starts like a literal is never taken for a bare string

Imports = Mapping[str, ImportStatement]  # by the name that each binds
Target = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Mention:
    """`@scope/selector`, or `@scope/selector()` when `call`, and the imports that give it a meaning."""

    selector: str
    scope: tuple[str, ...]
    call: bool
    imports: Imports

    @property
    def place(self) -> tuple[str, list[str]]:
        """The module that the first name stands for, and the names after it."""
        first, *names = self.selector.split(".")
        if first not in self.imports:
            raise ValueError(
                f"got {self.selector}, expected a module that this file imports: {comma_list(sorted(self.imports))}"
                f"{suggest_name(first, self.imports)}"
            )
        line = self.imports[first]
        return (line.module if line.is_from or line.alias else first), names


@dataclass(frozen=True)
class Statement:
    """`scope/owner.name = value` as it is written; without an owner a macro, without a name the head of a block."""

    at: str  # file:line, or the flag
    scope: str
    owner: Mention | None
    name: str
    value: Any  # with Mention and Macro in it
    flag: str = ""  # of the command line


@dataclass
class GinText:
    """What files and parameters say, before any name of a function has a meaning."""

    statements: list[Statement] = field(default_factory=list)
    imports: list[tuple[ImportStatement, str]] = field(default_factory=list)  # with the place of each
    bound_at: dict[str, str] = field(default_factory=dict)  # as in Bindings, as the next two
    used_at: dict[str, str] = field(default_factory=dict)
    from_params: set[str] = field(default_factory=set)
    param_lines: list[str] = field(default_factory=list)  # the parameters as lines of gin
    param_imports: set[str] = field(default_factory=set)  # the import lines that they need


def parse_gin(gin_files: Sequence[str], gin_params: Sequence[str]) -> Bindings:
    """Everything the files bind, then the parameters on top, with every module, function and knob name checked."""
    sources = Sources()
    text = read_gin(gin_files, gin_params, sources)
    declared_bindings(text, sources)
    return imported_bindings(text)


def read_gin(gin_files: Sequence[str], gin_params: Sequence[str], sources: Sources) -> GinText:
    """The statements of files and parameters. Nothing is imported; syntax errors show first."""
    search_folder(Path.cwd())
    if (GIN_FOLDER.parent / "experiments").is_dir():
        search_folder(GIN_FOLDER.parent)  # gin files of a clone import experiments/tiny, wherever they run
    text = GinText()
    for file in gin_files:
        read_file(file, (), text)
    for param in gin_params:
        text.statements.append(param_statement(param, text, sources))
    return text


def declared_bindings(text: GinText, sources: Sources) -> Bindings:
    """The bindings of functions as their modules' source declares them; one of a loaded module is itself.

    Raises ValueError for a module that is not there, a name that it does not have, a knob that a function has not.
    """
    for line, at in text.imports:
        try:
            check_module(line.module)
        except ValueError as error:
            raise ValueError(f"{at}: {error}{of_clone(line.module)}") from error
    return bind(text, lambda mention: sources.function(*mention.place))


def imported_bindings(text: GinText) -> Bindings:
    """The bindings of the functions themselves: every module is imported. Raises ValueError as declared_bindings."""
    for line, at in text.imports:
        try:
            importlib.import_module(line.module)
        except Exception as error:
            raise ValueError(f"{at}: {import_problem(error)}{of_clone(line.module)}") from error

    def target(mention: Mention) -> Target:
        module, names = mention.place
        found = named_attribute(sys.modules[module], names)
        if not callable(found):
            raise ValueError(f"got {found!r}, expected a function or class of a module")
        return found

    bindings = bind(text, target)
    complain([problem for target in functions(bindings) for problem in lookup_problem(target)])
    return bindings


def bind(text: GinText, target: Callable[[Mention], Target]) -> Bindings:
    """The bindings that the statements make, a later one in the place of an earlier."""
    bindings = Bindings(bound_at=text.bound_at, used_at=text.used_at, from_params=text.from_params)

    def plain(value: Any) -> Any:
        match value:
            case Mention():
                return Reference(named(value), value.scope, value.call)
            case dict():
                return {plain(key): plain(item) for key, item in value.items()}
            case list() | tuple():
                return type(value)(plain(item) for item in value)
        return value

    def named(mention: Mention) -> Target:
        try:
            return target(mention)
        except ValueError as error:
            raise ValueError(f"{mention.selector}: {error}") from error

    for each in text.statements:
        try:
            value = plain(each.value)
            if each.owner is None:
                bindings.macros[each.name] = value
                continue
            owner = named(each.owner)
            if not each.name:
                continue
            for problem in bad_names(each.owner.selector, owner, [each.name]):
                elsewhere = "" if "; did you mean " in problem else knob_elsewhere(each.name, text, named)
                raise ValueError(f"{problem}{elsewhere}")
        except ValueError as error:
            raise ValueError(f"{each.at}: {error}") from error
        bindings.knobs.setdefault((each.scope, owner), {})[each.name] = value
        if each.flag:
            bindings.knobs_from_params.setdefault((each.scope, owner), {})[each.name] = each.flag
    return bindings


def lookup_problem(target: Any) -> Iterator[str]:
    """Worker processes and the dumped text look a function up by its own name, so it has to be there."""
    try:
        by_name = reduce(getattr, target.__qualname__.split("."), sys.modules[target.__module__])
    except (AttributeError, KeyError):
        by_name = None
    if by_name != target:
        yield f"{full_name(target)}: got {target!r}, not found by that name; expected a function or class of a module"


class Listener(ParserDelegate):
    """Notes the macros and functions that a text mentions; resolves nothing."""

    def __init__(self, imports: Imports) -> None:
        self.imports = imports
        self.macros: list[str] = []
        self.functions: list[str] = []

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Mention:
        *scope, selector = scoped_selector.split("/")
        self.functions.append(selector)
        return Mention(selector, tuple(scope), evaluate, self.imports)

    def macro(self, name: str) -> Macro:
        self.macros.append(name)
        return Macro(name)


def read_file(file: str, chain: tuple[Path, ...], text: GinText) -> None:
    """Add the statements of a file and of its includes, in their order.

    The folder of a file is searched for modules that it imports, after all others.
    """
    path = find(file, chain)
    if not path.resolve().is_relative_to(GIN_FOLDER):
        search_folder(path.resolve().parent)
    if path in chain:
        raise ValueError(f"{chain[-1]}: got an include of {path}, which includes this file, expected no circle")
    imports: dict[str, ImportStatement] = {}
    listener, dynamic = Listener(imports), False
    with open(path, encoding="utf-8") as lines:
        try:
            for parsed in ConfigParser(lines, listener):
                at = f"{path}:{parsed.location.line_num}"
                note_macros(listener.macros, at, text)
                owner = None
                if isinstance(parsed, BlockDeclaration) or getattr(parsed, "arg_name", ""):
                    owner = listener.configurable_reference(parsed.selector, False)
                match parsed:
                    case IncludeStatement():
                        read_file(parsed.filename, (*chain, path), text)
                    case ImportStatement(module=module) if module.startswith("__gin__"):
                        dynamic = check_feature(parsed, at, imports)
                    case ImportStatement():
                        imports[parsed.bound_name()] = parsed
                        text.imports.append((parsed, at))
                    case BlockDeclaration():
                        text.statements.append(Statement(at, parsed.scope, owner, "", None))
                    case BindingStatement(arg_name=""):
                        name = "/".join(filter(None, [parsed.scope, parsed.selector]))
                        text.bound_at[name] = at
                        text.statements.append(Statement(at, "", None, name, parsed.value))
                    case BindingStatement():
                        text.statements.append(Statement(at, parsed.scope, owner, parsed.arg_name, parsed.value))
                check_functions(listener.functions, at, dynamic)
                listener.functions.clear()
                listener.macros.clear()
        except (SyntaxError, tokenize.TokenError) as error:
            raise ValueError(broken(error, path)) from error


def note_macros(names: Sequence[str], at: str, text: GinText) -> None:
    """Note where macros are used first. Raises ValueError for a constant of gin's."""
    for name in names:
        if "." in name:
            raise ValueError(f"{at}: got %{name}, expected a value, a macro or a function: gin's own are not supported")
        text.used_at.setdefault(name, at)


def check_feature(line: ImportStatement, at: str, imports: Imports) -> bool:
    """Whether a line turns dynamic registration on: the only one of its kind, before other imports."""
    if line.module != DYNAMIC or line.alias or imports:
        raise ValueError(f"{at}: got `{line.format()}`, expected `{DYNAMIC_LINE}`, before other imports")
    return True


def check_functions(selectors: Sequence[str], at: str, dynamic: bool) -> None:
    """Raise ValueError unless each is module.function, and nothing is named before dynamic registration is on."""
    for selector in selectors:
        if not dynamic:
            raise ValueError(f"{at}: got {selector}, expected a line `{DYNAMIC_LINE}` before it")
        if "." not in selector:
            raise ValueError(
                f"{at}: got {selector}, expected module.function (and module.function.knob to bind a knob)"
            )


def find(file: str, chain: tuple[Path, ...]) -> Path:
    """The file gin would open: from the current directory, else from the project's gin folder.

    A file here of the name that a file of that folder includes is refused: gin would take it in that one's place.
    """
    here, ours = Path(file), GIN_FOLDER / file
    both = bool(chain) and chain[-1].is_relative_to(GIN_FOLDER) and ours.is_file() and here.is_file()
    if both and not here.samefile(ours):
        raise ValueError(
            f"{chain[-1]}: got an include of {file}, and a file {here.absolute()} that gin would read in its place; "
            "expected another name for that one"
        )
    for path in (here, ours):
        if path.is_file():
            return path
    files = [str(path.relative_to(GIN_FOLDER)) for path in GIN_FOLDER.rglob("*.gin")]
    by = f"{chain[-1]}: " if chain else ""
    raise FileNotFoundError(
        f"{by}got {file!r}, expected a gin file, from here or from {GIN_FOLDER}{suggest_name(file, files)}"
    )


def param_statement(param: str, text: GinText, sources: Sources) -> Statement:
    """`NAME=VALUE` as a statement, with those imports of the files that its names need."""
    flag, line = f"--set {param!r}", param_line(param, text, sources)
    imports: dict[str, ImportStatement] = {}
    listener = Listener(imports)
    (parsed,) = ConfigParser(f"{line}\n", listener)
    owner = listener.configurable_reference(parsed.selector, False) if parsed.arg_name else None
    name = parsed.arg_name or "/".join(filter(None, [parsed.scope, parsed.selector]))
    if owner is None:
        text.bound_at[name] = flag
        text.from_params.add(name)
    note_macros(listener.macros, flag, text)
    check_functions(listener.functions, flag, dynamic=True)
    for selector in listener.functions:
        needed = imports_of(selector, flag, text)
        imports.update({each.bound_name(): each for each in needed})
        text.param_imports.update(each.format() for each in needed)
    text.param_lines.append(line)
    return Statement(flag, parsed.scope if owner else "", owner, name, parsed.value, flag if owner else "")


def param_line(param: str, text: GinText, sources: Sources) -> str:
    """`NAME=VALUE` as a line of gin.

    Shells eat quotes: for a macro, and for a knob of text or a path, a value that is no gin literal is a string
    (`MODEL=/data/model`, `rows.file.path=mine.jsonl`).
    """
    flag = f"--set {param!r}"
    name, equals, value = (part.strip() for part in param.partition("="))
    if not equals or not NAME.fullmatch(name):
        raise ValueError(f"{flag}: got {param!r}, expected NAME=VALUE for a macro or module.function.knob=VALUE")
    try:
        (_,) = ConfigParser(f"{name} = {value}\n", Listener({}))
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        spelled = value.capitalize() if value.capitalize() in ("True", "False", "None") else ""
        selector, _, knob = name.rpartition("/")[2].rpartition(".")
        if selector:
            lines = {line.bound_name(): line for line in imports_of(selector, flag, text)}
            bare = takes_text(signature_of(Mention(selector, (), False, lines), sources).get(knob))
        if (selector and not bare) or not value or spelled or value.startswith(OPENERS):
            hint = spelled or 'such as 3, 1e-6, "text", [1, 2], %MACRO or @module.function'
            raise ValueError(f"{flag}: got {value!r}, expected a gin value: {hint}") from error
        value = repr(value)
    return f"{name} = {value}"


def overlay_text(gin_files: Sequence[str], gin_params: Sequence[str]) -> str:
    """The files with the parameters on top as one gin file that includes them; imports none of their modules.

    Raises ValueError for a syntax error, for a parameter of another form and for one of a module that there is not.
    """
    text = read_gin(gin_files, gin_params, Sources())
    includes = [f'include "{file}"' for file in gin_files]
    return "\n".join([DYNAMIC_LINE, *sorted(text.param_imports), "", *includes, "", *text.param_lines]) + "\n"


def signature_of(mention: Mention, sources: Sources) -> Mapping[str, Any]:
    """The parameters of a function by name; none if there is no such function, which is reported later."""
    try:
        return signature(sources.function(*mention.place))
    except ValueError:
        return {}


def imports_of(selector: str, flag: str, text: GinText) -> list[ImportStatement]:
    """The files' import lines that give the module of `module.function` its meaning; else an import of that module."""
    name, _, function = selector.partition(".")
    modules = [line for line, _ in text.imports]
    named = [line for line in modules if line.bound_name() == name]
    # `import a.b` and `import a.c` both bind `a`, and mean the same by it.
    meanings = {line.module if line.is_from or line.alias else name for line in named}
    if len(meanings) == 1:
        return named
    module = selector.rpartition(".")[0]
    if not named and module_place(module) != (None, []):
        line = ImportStatement(module, False, None, None)
        text.imports.append((line, flag))
        return [line]
    names = sorted({line.bound_name() for line in modules})
    got = f"{name}, which stands for {' and for '.join(sorted(meanings))}" if meanings else name
    expected = f"a module that the gin files import, one meaning each: {comma_list(names)}"
    sources = {line.bound_name(): PACKAGE.joinpath(*line.module.split(".")[1:]).with_suffix(".py") for line in modules}
    defined = re.compile(rf"^(?:def|class) {re.escape(function)}\b", re.MULTILINE)
    owners = [
        f"{owner}.{function}" for owner, path in sources.items() if path.is_file() and defined.search(path.read_text())
    ]
    hint = f"; there is {comma_list(owners)}" if owners else suggest_name(name, names)
    raise ValueError(f"{flag}: got {got}, expected {expected}{hint}")


def broken(error: SyntaxError | tokenize.TokenError, path: Path) -> str:
    """A syntax error as `file:line: what: text`."""
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}: {' '.join(str(error.msg).split())}: {(error.text or '').strip()}"
    message, (line, _) = error.args
    return f"{path}:{line}: {message}"


def import_problem(error: Exception) -> str:
    """Why a module cannot be imported; if it broke inside of it, where."""
    message = str(error).strip().partition("\n")[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename.startswith("<") or last.filename == importlib.__file__:
        return message
    return f"{type(error).__name__}: {message} (raised at {last.filename}:{last.lineno})"


def of_clone(module: str) -> str:
    """What to do about a module of experiments/ that is not there."""
    if module.partition(".")[0] != "experiments" or (GIN_FOLDER.parent / "experiments").is_dir():
        return ""
    fix = "run in the folder of a clone, or install it from there: pip install -e ."
    return f": toy models and tasks are in experiments/ of a clone, and in no wheel; {fix}"


def knob_elsewhere(knob: str, text: GinText, target: Callable[[Mention], Target]) -> str:
    """`; there is NAME.knob, ...` for functions of the files that have such a knob, or nothing."""
    owners = {each.owner.selector: each.owner for each in text.statements if each.owner}
    places = sorted(f"{selector}.{knob}" for selector, owner in owners.items() if knob in knobs_of(target(owner)))
    return f"; there is {comma_list(places)}" if places else ""
