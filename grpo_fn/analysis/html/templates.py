"""The templates, style sheets and scripts of this folder. What a template is given is escaped, unless it is Markup."""

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

FILES = PackageLoader("grpo_fn.analysis", "html")
ENVIRONMENT = Environment(loader=FILES, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def template(name: str) -> Template:
    """The template of that file."""
    return ENVIRONMENT.get_template(name)


def source(name: str) -> Markup:
    """The file as it is, for a <style> or <script>."""
    return Markup(FILES.get_source(ENVIRONMENT, name)[0])
