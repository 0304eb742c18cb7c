"""gin files and command-line parameters to Bindings. The only file that imports gin.

gin-config is pinned, so its tables `_CONFIG` and `_REGISTRY` are read directly.
"""

import importlib.util
import os.path
import re
import sys
import tokenize
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import gin
from gin import config_parser
from gin.config_parser import BindingStatement, BlockDeclaration, ConfigParser, ImportStatement, IncludeStatement

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
)
from grpo_fn.core.display_text import suggest_name

PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package in a wheel, beside it in a checkout.
GIN_FOLDER = PACKAGE / "gin" if (PACKAGE / "gin").is_dir() else PACKAGE.parent / "gin"
DYNAMIC = "__gin__.dynamic_registration"
DYNAMIC_LINE = "from __gin__ import dynamic_registration"
NAME = re.compile(r"([A-Za-z_]\w*/)*([A-Za-z_]\w*\.)*[A-Za-z_]\w*")
OPENERS = ("'", '"', "[", "{", "(", "@", "%")  # a value that starts like a literal is never taken for a bare string

gin.add_config_file_search_path(str(GIN_FOLDER))  # the current directory comes first
# Only plain files. gin's other reader searches sys.path: at every path it misses it logs an error, which gives the root
# logger a handler, and on Python 3.11 it fails unless importlib.util happens to be loaded.
gin.config._FILE_READERS[:] = [(open, os.path.isfile)]


def parse_gin(gin_files: Sequence[str], gin_params: Sequence[str]) -> Bindings:
    """Everything the files bind, then the parameters on top, with every module, function and knob name checked.

    gin keeps its state in the module; it is empty again when this returns or raises.
    """
    search_folder(Path.cwd())
    if (GIN_FOLDER.parent / "experiments").is_dir():
        search_folder(GIN_FOLDER.parent)  # gin files of a clone import experiments/tiny, wherever they run
    bindings, imports = Bindings(), []
    for file in gin_files:
        scan_imports(file, (), bindings, imports)
    statements = [param_statement(param, bindings, imports) for param in gin_params]  # before modules are imported
    gin.clear_config()
    try:
        for file in gin_files:
            parse(gin.parse_config_file, file, "")
        for param, statement in zip(gin_params, statements, strict=True):
            parse_param(param, statement, bindings)
        for (scope, selector), knobs in gin.config._CONFIG.items():
            target = wrapped_function(selector)
            values = {knob: plain_value(value) for knob, value in knobs.items()}
            if target is gin.config.macro:
                bindings.macros[scope] = values["value"]
            else:
                bindings.knobs[scope, target] = values
    finally:
        gin.clear_config()
    complain([problem for target in functions(bindings) for problem in lookup_problem(target)])
    labels = {key: "/".join(filter(None, [key[0], full_name(key[1])])) for key in bindings.knobs}
    complain([p for key, knobs in bindings.knobs.items() for p in bad_names(labels[key], key[1], knobs)])
    return bindings


def overlay_text(gin_files: Sequence[str], gin_params: Sequence[str]) -> str:
    """The files with the parameters on top as one gin file that includes them; imports none of their modules.

    Raises ValueError for a syntax error, for a parameter of another form and for one of a module that there is not.
    """
    bindings, imports = Bindings(), []
    for file in gin_files:
        scan_imports(file, (), bindings, imports)
    lines = [param_statement(param, bindings, imports).split("\n") for param in gin_params]
    needed = sorted({line for _, *needed, _ in lines for line in needed})
    includes = [f'include "{file}"' for file in gin_files]
    return "\n".join([DYNAMIC_LINE, *needed, "", *includes, "", *(line[-1] for line in lines)]) + "\n"


def parse_param(param: str, statement: str, bindings: Bindings) -> None:
    """Let gin parse `NAME=VALUE` on top of what it has, and note the knob that this binds."""
    flag, table = f"--gin_param {param!r}", gin.config._CONFIG
    earlier = {key: {**knobs} for key, knobs in table.items()}
    table.clear()  # so that what is in it afterwards is of this parameter
    parse(gin.parse_config, statement, f"{flag}: ")
    new = {key: {**knobs} for key, knobs in table.items()}
    table.clear()
    for key in dict.fromkeys([*earlier, *new]):
        table[key] = earlier.get(key, {}) | new.get(key, {})
    for (scope, selector), knobs in new.items():
        if (target := wrapped_function(selector)) is not gin.config.macro:
            bindings.knobs_from_params.setdefault((scope, target), {}).update(dict.fromkeys(knobs, flag))


def wrapped_function(selector: str) -> Callable[..., Any]:
    """The function itself that gin knows by this name."""
    return gin.config._REGISTRY[selector].wrapped


def plain_value(value: Any) -> Any:
    """A bound value with gin's references replaced by ours."""
    match value:
        case gin.config.ConfigurableReference(configurable=registered, scopes=scopes, evaluate=evaluate):
            if registered.wrapped is gin.config.macro:
                return Macro("/".join(scopes))
            if registered.module == "gin":
                raise ValueError(f"got {value!r}, expected a value, a macro or a function: gin's own are not supported")
            return Reference(registered.wrapped, tuple(scopes), evaluate)
        case dict():
            return {plain_value(key): plain_value(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(plain_value(item) for item in value)
    return value


def lookup_problem(target: Any) -> Iterator[str]:
    """Worker processes and the dumped text look a function up by its own name, so it has to be there."""
    try:
        by_name = reduce(getattr, target.__qualname__.split("."), sys.modules[target.__module__])
    except (AttributeError, KeyError):
        by_name = None
    if by_name != target:
        yield f"{full_name(target)}: got {target!r}, not found by that name; expected a function or class of a module"


class Listener(config_parser.ParserDelegate):
    """Notes the macros and functions that a text mentions; resolves nothing."""

    def __init__(self) -> None:
        self.macros: list[str] = []
        self.functions: list[str] = []

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> None:
        self.functions.append(scoped_selector.rpartition("/")[2])

    def macro(self, name: str) -> None:
        self.macros.append(name)


def scan_imports(file: str, chain: tuple[Path, ...], bindings: Bindings, imports: list[ImportStatement]) -> None:
    """Note imports and macros of a file and its includes; syntax errors show before any module is imported.

    The folder of a file is searched for modules that it imports, after all others.
    """
    path = find(file, chain)
    if not path.resolve().is_relative_to(GIN_FOLDER):
        search_folder(path.resolve().parent)
    if path in chain:
        raise ValueError(f"{chain[-1]}: got an include of {path}, which includes this file, expected no circle")
    listener, dynamic = Listener(), False
    with open(path, encoding="utf-8") as text:
        try:
            for parsed in ConfigParser(text, listener):
                at = f"{path}:{parsed.location.line_num}"
                bindings.used_at.update({name: bindings.used_at.get(name, at) for name in listener.macros})
                listener.macros.clear()
                match parsed:
                    case IncludeStatement():
                        scan_imports(parsed.filename, (*chain, path), bindings, imports)
                    case ImportStatement():
                        dynamic |= parsed.module == DYNAMIC
                        imports.append(parsed)
                    case BindingStatement(arg_name=""):
                        bindings.bound_at["/".join(filter(None, [parsed.scope, parsed.selector]))] = at
                    case BindingStatement() | BlockDeclaration():
                        listener.functions.append(parsed.selector)
                check_functions(listener.functions, at, dynamic)
                listener.functions.clear()
        except (SyntaxError, tokenize.TokenError) as error:
            raise ValueError(broken(error, path)) from error


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


def param_statement(param: str, bindings: Bindings, imports: list[ImportStatement]) -> str:
    """`NAME=VALUE` as gin text, together with those imports of the files that its names need.

    Shells eat quotes: for a macro, a value that is no gin literal is a string (`MODEL=/data/model`).
    """
    flag, listener = f"--gin_param {param!r}", Listener()
    name, equals, value = (part.strip() for part in param.partition("="))
    if not equals or not NAME.fullmatch(name):
        raise ValueError(f"{flag}: got {param!r}, expected NAME=VALUE for a macro or module.function.knob=VALUE")
    try:
        (_,) = ConfigParser(f"{name} = {value}\n", listener)
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        spelled = value.capitalize() if value.capitalize() in ("True", "False", "None") else ""
        if "." in name or not value or spelled or value.startswith(OPENERS):
            hint = spelled or 'such as 3, 1e-6, "text", [1, 2], %MACRO or @module.function'
            raise ValueError(f"{flag}: got {value!r}, expected a gin value: {hint}") from error
        value = repr(value)
    if "." in name:
        listener.functions.append(name.rpartition("/")[2].rpartition(".")[0])
    else:
        bindings.bound_at[name] = flag
        bindings.from_params.add(name)
    bindings.used_at.update({macro: bindings.used_at.get(macro, flag) for macro in listener.macros})
    check_functions(listener.functions, flag, dynamic=True)
    needed = dict.fromkeys(line for selector in listener.functions for line in imports_of(selector, flag, imports))
    return "\n".join([DYNAMIC_LINE, *needed, f"{name} = {value}"])


def imports_of(selector: str, flag: str, imports: list[ImportStatement]) -> list[str]:
    """The files' import lines that give the module of `module.function` its meaning; else an import of that module."""
    name, _, function = selector.partition(".")
    modules = [line for line in imports if line.module != DYNAMIC]
    named = [line for line in modules if line.bound_name() == name]
    # `import a.b` and `import a.c` both bind `a`, and mean the same by it.
    meanings = {line.module if line.is_from or line.alias else name for line in named}
    if len(meanings) == 1:
        return [line.format() for line in named]
    if not named and (module := importable_module(selector)):
        return [f"import {module}"]
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


def importable_module(selector: str) -> str:
    """The module of `package.module.function` if there is one; an empty text otherwise."""
    module = selector.rpartition(".")[0]
    try:
        return module if importlib.util.find_spec(module) is not None else ""
    except (ImportError, ValueError):  # of a package in front of it
        return ""


def parse(parser: Callable[[str], Any], what: str, flag: str) -> None:
    """Let gin parse. Whatever goes wrong, in gin or in a module that it imports, becomes one ValueError."""
    try:
        parser(what)
    except Exception as error:
        raise ValueError(flag + explain_gin_error(error, with_place=not flag)) from error


def broken(error: SyntaxError | tokenize.TokenError, path: Path) -> str:
    """A syntax error as `file:line: what: text`."""
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}: {' '.join(str(error.msg).split())}: {(error.text or '').strip()}"
    message, (line, _) = error.args
    return f"{path}:{line}: {message}"


def explain_gin_error(error: Exception, with_place: bool) -> str:
    """gin's message, or that of a failed import, as `file:line: what is wrong; what was probably meant`."""
    message, _, rest = str(error).partition("\n  In ")
    place = re.match(r'file "(.+)", line (\d+)\n', rest)
    where = f"{place[1]}:{place[2]}: " if place and with_place else ""
    if match := re.match(r"Configurable '(.+)' doesn't have a parameter named '(.+)'", message):
        (problem,) = bad_names(match[1], gin.config._REGISTRY.get_match(match[1]).wrapped, [match[2]])
        return where + problem + ("" if "; did you mean " in problem else knob_elsewhere(match[2]))
    if match := re.match(r"Couldn't resolve selector (\S+); <module '(\S+)'.*> has no attribute (\w+)", message):
        return f"{where}{match[1]}: {match[2]} has no {match[3]}{suggest_name(match[3], vars(sys.modules[match[2]]))}"
    if re.match(r"No module named 'experiments\b", message):
        first_line = message.strip().partition("\n")[0]
        fix = "run in the folder of a clone, or install it from there: pip install -e ."
        return f"{where}{first_line}: toy models and tasks are in experiments/ of a clone, and in no wheel; {fix}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not last.filename.startswith(("<", str(Path(gin.__file__).parent))):  # it broke inside the imported module
        first_line = message.strip().partition("\n")[0]
        message = f"{type(error).__name__}: {first_line} (raised at {last.filename}:{last.lineno})"
    return where + message


def knob_elsewhere(knob: str) -> str:
    """`; NAME.knob, ... have that name` for imported functions that have such a knob, or nothing."""
    owners = [name for name, configurable in gin.config._REGISTRY.items() if knob in knobs_of(configurable.wrapped)]
    places = sorted(f"{'.'.join(name.split('.')[-2:])}.{knob}" for name in owners)
    return f"; there is {comma_list(places)}" if places else ""
