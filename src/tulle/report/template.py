"""Fills the templates beside it, which share `macros.html` and `page.css`."""

from importlib.resources import files

import jinja2
from markupsafe import Markup


def fill(name: str, **values: object) -> str:
    """The template of a name, filled; a value that is missing is an error."""
    here = files("tulle.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda other: here.joinpath(other).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup(here.joinpath("page.css").read_text(encoding="utf-8"))
    return environment.get_template(name).render(style=style, **values)
