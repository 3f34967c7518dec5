"""What all pages are made with: templates that escape what they are given, and one style sheet."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup


def environment(package: str, **filters: Callable[[Any], str]) -> jinja2.Environment:
    """The templates of a package: values are escaped, and one that is missing is an error.

    Args:
        package: whose folder has the templates, such as `kvkeep.results.report`.
        filters: by the names that the templates use.
    """
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: text_of(package, name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= filters
    return made


def style_sheet() -> Markup:
    """The style sheet of all pages."""
    return Markup(text_of("kvkeep.results.report", "page.css"))


def text_of(package: str, name: str) -> str:
    """A file that comes along in a package's folder."""
    return (files(package) / name).read_text(encoding="utf-8")
