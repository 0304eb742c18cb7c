"""The templates, style sheets and scripts of this folder. What a template is given is escaped, unless it is Markup."""

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from grpo_fn.core.display_text import escape_control

FILES = PackageLoader("grpo_fn.analysis", "html")


def without_control(value: object) -> object:
    """A text with its control characters as escapes; Markup, and what is no text, as it is."""
    return escape_control(value) if type(value) is str else value


ENVIRONMENT = Environment(
    loader=FILES, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=without_control
)


def template(name: str) -> Template:
    """The template of that file."""
    return ENVIRONMENT.get_template(name)


def source(name: str) -> Markup:
    """The file as it is, for a <style> or <script>."""
    return Markup(FILES.get_source(ENVIRONMENT, name)[0])
