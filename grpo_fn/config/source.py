"""Functions as the source of their modules declares them: knobs are checked before a module, and torch, is imported.

Each is a stand-in with the name and the signature of the function or class: `resolve` works on either. What the source
does not say for certain (a decorator, a base from elsewhere, a name that is assigned) takes any knob; importing says
more. A module that is loaded is looked at itself.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from grpo_fn.core.display_text import suggest_name

ANY_KNOB = [Parameter("data", Parameter.VAR_POSITIONAL), Parameter("knobs", Parameter.VAR_KEYWORD)]
PLAIN = {"int": int, "float": float, "str": str, "bool": bool}
EMPTY_BASES = {"object", "ABC", "Protocol", "Generic", "AbstractContextManager"}  # they add no parameter
OURS = ("grpo_fn", "experiments")  # their modules have files of their own


class SourceModule(NamedTuple):
    """A module's source."""

    definitions: Mapping[str, ast.FunctionDef | ast.ClassDef]  # at its top level, those whose names are bound once
    imported: Mapping[str, tuple[str, str]]  # name -> (module, name there)
    constants: Mapping[str, Any]  # literals by name, and `function.NAME`
    names: Sequence[str]  # all that are bound
    open_ended: bool  # names come from elsewhere, too


class Sources:
    """The modules that one configuration names."""

    def __init__(self) -> None:
        self.modules: dict[str, SourceModule | None] = {}
        self.stand_ins: dict[tuple[str, str], Callable[..., Any]] = {}

    def function(self, module: str, path: Sequence[str]) -> Callable[..., Any]:
        """What `path` leads to from a module. Raises ValueError for a name that the module does not have."""
        *inner, name = path
        while inner and source_file(f"{module}.{inner[0]}") is not None:
            module = f"{module}.{inner.pop(0)}"
        if module in sys.modules:
            return named_attribute(sys.modules[module], [*inner, name])
        return self.stand_in(module, [*inner, name])

    def stand_in(self, module: str, path: Sequence[str]) -> Callable[..., Any]:
        """The stand-in for a function of a module. Raises ValueError for a name that the module does not bind."""
        *inner, name = path
        key = (module, ".".join([*inner, name]))
        if key not in self.stand_ins:
            source = self.module(module)
            node = None if source is None or inner else source.definitions.get(name)
            if source is not None and not inner and name not in source.names and not source.open_ended:
                raise ValueError(f"{module.rpartition('.')[2]} has no {name}{suggest_name(name, source.names)}")
            self.stand_ins[key] = make_stand_in(*key, node, self.parameters(module, node), source)
        return self.stand_ins[key]

    def constant(self, module: str, name: str, default: Any) -> Any:
        """The value of `NAME = literal` in a module."""
        if module in sys.modules:
            return getattr(sys.modules[module], name, default)
        source = self.module(module)
        return default if source is None else source.constants.get(name, default)

    def module(self, name: str) -> SourceModule | None:
        """The source of a module; None if it has no Python file."""
        if name not in self.modules:
            file = source_file(name)
            try:
                self.modules[name] = None if file is None else read_source(file)
            except (OSError, SyntaxError, ValueError):  # importing says what is wrong
                self.modules[name] = None
        return self.modules[name]

    def parameters(self, module: str, node: ast.AST | None) -> list[Parameter] | None:
        """Those of a function, or of a class's constructor; None if the source does not say."""
        match node:
            case ast.FunctionDef(decorator_list=[]):
                return function_parameters(node.args)
            case ast.ClassDef(decorator_list=decorators, keywords=[]):
                methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
                is_dataclass = any(ast.unparse(each).startswith("dataclass") for each in decorators)
                if "__new__" in methods or len(decorators) > is_dataclass:
                    return None
                if "__init__" in methods:
                    return function_parameters(methods["__init__"].args)[1:]
                inherited = self.inherited_parameters(module, node)
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                if inherited is None or not (is_dataclass or "NamedTuple" in map(ast.unparse, node.bases)):
                    return inherited
                kw_only = any("kw_only=True" in ast.unparse(each) for each in decorators)
                merged = {each.name: each for each in inherited} | {
                    each.name: each for each in filter(None, (field_parameter(field, kw_only) for field in fields))
                }
                return sorted(merged.values(), key=lambda each: each.kind)
        return None

    def inherited_parameters(self, module: str, node: ast.ClassDef) -> list[Parameter] | None:
        """Those of the bases, as far as all of them can be read."""
        parameters: list[Parameter] = []
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            if name.rpartition(".")[2] in {*EMPTY_BASES, "NamedTuple"}:
                continue
            source = self.module(module)
            place, there = (module, name) if name in source.definitions else source.imported.get(name, ("", ""))
            owner = self.module(place) if place else None
            found = self.parameters(place, owner.definitions.get(there)) if owner else None
            if found is None:
                return None
            parameters += found
        return parameters


def named_attribute(module: Any, path: Sequence[str]) -> Any:
    """What `path` leads to from a module that is imported. Raises ValueError for a name that is not there."""
    try:
        return reduce(getattr, path, module)
    except AttributeError as error:
        names = vars(error.obj) if hasattr(error.obj, "__dict__") else ()
        owner = getattr(error.obj, "__name__", repr(error.obj)).rpartition(".")[2]
        raise ValueError(f"{owner} has no {error.name}{suggest_name(error.name, names)}") from error


def source_file(name: str) -> Path | None:
    """The file of a module or package; None if it has no Python source."""
    file, _ = module_place(name)
    return Path(file) if file and file.endswith(".py") else None


def module_place(name: str) -> tuple[str | None, Sequence[str]]:
    """The file of a module and the folders of a package, found without importing anything."""
    top, *rest = name.split(".")
    if top in sys.modules:
        file, folders = getattr(sys.modules[top], "__file__", None), [*getattr(sys.modules[top], "__path__", ())]
    elif (spec := find_spec(top)) is not None:
        file, folders = spec.origin, [*(spec.submodule_search_locations or ())]
    else:
        return None, []
    for part in rest:
        places = [Path(folder, part) for folder in folders]
        folders = [str(place) for place in places if place.is_dir()]
        files = [place / "__init__.py" for place in places] + [place.with_name(f"{part}.py") for place in places]
        file = next((str(each) for each in files if each.is_file()), None)
    return file, folders


def check_module(name: str) -> None:
    """Raise ValueError for a module that is certainly not there."""
    top, *rest = name.split(".")
    if top not in sys.modules and find_spec(top) is None:
        raise ValueError(f"No module named {top!r}")
    parent = top
    for part in rest if top in OURS else ():
        inner = f"{parent}.{part}"
        if module_place(inner) == (None, []):
            names = [path.stem for folder in module_place(parent)[1] for path in Path(folder).glob("[!_]*")]
            raise ValueError(f"No module named {inner!r}{suggest_name(part, names)}")
        parent = inner


def read_source(file: Path) -> SourceModule:
    """The names of a module."""
    tree = ast.parse(file.read_bytes())
    names, imported, constants = [*bound_names(tree.body)], {}, {}
    for node in tree.body:
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                imported |= {each.asname or each.name: (module, each.name) for each in node.names}
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if node.value is not None:
                constants |= literal_of(ast.unparse(target), node.value)
    definitions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and names.count(node.name) == 1
    }
    return SourceModule(definitions, imported, constants, names, "*" in names or "__getattr__" in names)


def bound_names(body: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that the statements bind, as often as they do, but those inside of functions and classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)
        else:
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler)]
            yield from bound_names(inner)
            values = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            yield from (
                each.id
                for value in values
                for each in ast.walk(value)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )


def literal_of(name: str, value: ast.expr) -> dict[str, Any]:
    """The value under its name if it is a literal."""
    try:
        return {name: ast.literal_eval(value)}
    except (ValueError, TypeError):
        return {}


def function_parameters(args: ast.arguments) -> list[Parameter]:
    """The parameters of a definition, as `inspect` gives them; a default only shows that there is one."""
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(args.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(args.args)
    parameters = [
        parameter(each.arg, kind, each.annotation, i >= required)
        for i, (each, kind) in enumerate(zip(positional, kinds, strict=True))
    ]
    if args.vararg:
        parameters.append(parameter(args.vararg.arg, Parameter.VAR_POSITIONAL, args.vararg.annotation, False))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(parameter(each.arg, Parameter.KEYWORD_ONLY, each.annotation, default is not None))
    if args.kwarg:
        parameters.append(parameter(args.kwarg.arg, Parameter.VAR_KEYWORD, args.kwarg.annotation, False))
    return parameters


def field_parameter(field: ast.AnnAssign, kw_only: bool) -> Parameter | None:
    """The parameter of a constructor that a field is; None for a class's variable and for a field that is not taken."""
    value = "" if field.value is None else ast.unparse(field.value)
    declared = value.startswith("field(")
    if "ClassVar" in ast.unparse(field.annotation) or (declared and "init=False" in value):
        return None
    has_default = "default" in value if declared else bool(value)
    kind = Parameter.KEYWORD_ONLY if kw_only or (declared and "kw_only=True" in value) else None
    return parameter(field.target.id, kind or Parameter.POSITIONAL_OR_KEYWORD, field.annotation, has_default)


def parameter(name: str, kind: Any, annotation: ast.expr | None, has_default: bool) -> Parameter:
    """A parameter whose default, if there is one, is `...`; its annotation is text unless it is a plain type."""
    text = "" if annotation is None else ast.unparse(annotation)
    return Parameter(
        name,
        kind,
        default=... if has_default else Parameter.empty,
        annotation=PLAIN.get(text, text) if text else Parameter.empty,
    )


def make_stand_in(
    module: str,
    name: str,
    node: ast.AST | None,
    parameters: list[Parameter] | None,
    source: SourceModule | None,
) -> Callable[..., Any]:
    """A function or class that has the name and the signature, and cannot be used for anything else."""
    # __validate_parameters__: a base's default before a field without one is the module's own error
    signature = Signature(ANY_KNOB if parameters is None else parameters, __validate_parameters__=False)
    about = {"__module__": module, "__qualname__": name, "__signature__": signature}
    if source is not None and (supplied := source.constants.get(f"{name}.SUPPLIED")) is not None:
        about["SUPPLIED"] = supplied
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                target = each.targets[0] if isinstance(each, ast.Assign) else each.target
                about |= literal_of(ast.unparse(target), each.value) if ast.unparse(target) == "SUPPLIED" else {}
        return type(name, (), about)

    def unloaded(*data: Any, **knobs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} is not imported")

    for attribute, value in about.items():
        setattr(unloaded, attribute, value)
    return unloaded


def takes_text(parameter: Parameter | None) -> bool:
    """Whether a knob's type allows text or a path, so that a text needs no quotes."""
    annotation = None if parameter is None else parameter.annotation
    if isinstance(annotation, str):
        return not {"str", "Path"}.isdisjoint(part.strip() for part in annotation.split("|"))
    parts = annotation.__args__ if isinstance(annotation, UnionType) else (annotation,)
    return str in parts or Path in parts
