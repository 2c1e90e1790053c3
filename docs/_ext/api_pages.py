"""Sphinx extension that writes the pages of the API reference: one entry for each public name.

Public names are those of every ``__all__``, those of `jaxrec` itself and those of
`jaxrec.ragged.fbgemm`. A name that several packages export is documented once, under its shortest
name; the others lead there. The build warns of a public name that no page describes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from flax import nnx
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import inspect as sphinx_inspect
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)

PAGES = "api"
# A package with more names has a page for each of its modules, others have one page.
NAMES_OF_A_PAGE = 40
# Modules without `__all__` whose functions users call as `jaxrec.ragged.fbgemm.permute_2d`.
NAMESPACES = ("jaxrec.ragged.fbgemm",)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public name."""

    package: str
    name: str
    value: Any
    module: str  # that defines it

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def directive(self) -> str:
        if inspect.isclass(self.value):
            return "autoexception" if issubclass(self.value, BaseException) else "autoclass"
        is_function = hasattr(self.value, "__wrapped__") or inspect.isroutine(self.value)
        return "autofunction" if is_function else "data"

    @property
    def key(self) -> object:
        """Equal for the names of one class or function, and for nothing else."""
        return self.full_name if self.directive == "data" else id(self.value)

    @property
    def text(self) -> str:
        """The docstring, which follows the assignment of a type or number; ``""`` without one."""
        if self.directive != "data":
            return inspect.getdoc(self.value) or ""
        _, following = self._assignment
        value = getattr(following, "value", None)
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        return inspect.cleandoc(value.value) if is_text else ""

    @property
    def definition(self) -> str:
        """The code that defines a type or number."""
        assignment, _ = self._assignment
        return ast.get_source_segment(inspect.getsource(sys.modules[self.module]), assignment) or ""

    @property
    def _assignment(self) -> tuple[ast.stmt, ast.stmt | None]:
        """The statement that assigns the name, and the one behind it."""
        body = ast.parse(inspect.getsource(sys.modules[self.module])).body
        for statement, following in itertools.zip_longest(body, body[1:]):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if any(isinstance(target, ast.Name) and target.id == self.name for target in targets):
                return statement, following
        raise LookupError(f"{self.module} does not assign {self.name}")


def packages() -> Iterator[ModuleType]:
    """Yield `jaxrec`, its packages that list their public names, and the namespaces."""
    import jaxrec

    yield jaxrec
    for found in pkgutil.walk_packages(jaxrec.__path__, "jaxrec."):
        if found.ispkg or found.name in NAMESPACES:
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__") or found.name in NAMESPACES:
                yield module


def imported_from(package: ModuleType) -> dict[str, str]:
    """Return the module from which a package imports each of its names."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(package)))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def entries(package: ModuleType) -> list[Entry]:
    """Return the public names of a package, without modules, which have pages of their own."""
    if package.__name__ in NAMESPACES:
        names = [
            name
            for name, value in vars(package).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == package.__name__
        ]
    else:
        names = [name for name in getattr(package, "__all__", dir(package)) if name[0] != "_"]
    sources = imported_from(package)
    return [
        Entry(package.__name__, name, value, sources.get(name, package.__name__))
        for name in sorted(names, key=str.lower)
        if not inspect.ismodule(value := getattr(package, name))
    ]


def documented(all_entries: Iterable[Entry]) -> dict[object, Entry]:
    """Return the entry under which each object is documented, by the entries' ``key``."""
    first: dict[object, Entry] = {}
    for entry in sorted(all_entries, key=lambda entry: entry.full_name.count(".")):
        first.setdefault(entry.key, entry)
    return first


def first_sentence(text: str | None) -> str:
    paragraph = inspect.cleandoc(text or "").split("\n\n")[0].replace("\n", " ")
    return paragraph.strip()


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def title_of(module: str) -> str:
    """Return the begin of a module's docstring as a title."""
    first = re.split(r"[.:] |,\s(?![^(]*\))", first_sentence(sys.modules[module].__doc__))[0]
    return first.rstrip(".").replace("`", "")


def summary(listed: Iterable[Entry], primary: dict[object, Entry]) -> str:
    """Return a table of names and their first sentences."""
    rows = []
    for entry in listed:
        target = primary[entry.key].full_name
        rows.append(f"   * - :py:obj:`{entry.name} <{target}>`")
        rows.append(f"     - {plural_names(first_sentence(entry.text))}")
    return ".. list-table::\n   :widths: auto\n   :class: api-summary\n\n" + "\n".join(rows) + "\n"


def description(entry: Entry) -> str:
    if entry.directive == "data":
        code = ".. code-block:: python\n\n" + textwrap.indent(entry.definition, "   ")
        body = textwrap.indent(f"{plural_names(entry.text)}\n\n{code}\n", "   ")
        return f".. py:data:: {entry.name}\n\n{body}"
    lines = [f".. {entry.directive}:: {entry.full_name}"]
    if entry.directive == "autoclass":
        lines.append("   :members:")
    return "\n".join(lines) + "\n"


def plural_names(text: str) -> str:
    """End the markup of names before the ``s`` of their plurals, as reStructuredText wants it."""
    return re.sub(r"(?<!`)(`[\w.]+`)(?=s\b)", r"\1\\ ", text)


def sections(listed: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries by the module that defines them."""
    by_module: dict[str, list[Entry]] = {}
    for entry in listed:
        by_module.setdefault(entry.module, []).append(entry)
    return dict(sorted(by_module.items(), key=lambda item: title_of(item[0]).lower()))


def package_pages(
    package: ModuleType, listed: list[Entry], primary: dict[object, Entry]
) -> dict[str, str]:
    """Return the text of a package's pages by their names."""
    name = package.__name__
    own = [entry for entry in listed if primary[entry.key] is entry]
    text = [f".. py:module:: {name}\n", heading(name, "="), inspect.getdoc(package) or "", ""]
    text.append(summary(listed, primary))
    pages = {}
    if len(own) > NAMES_OF_A_PAGE:
        text.append(".. toctree::\n   :hidden:\n")
        for module, members in sections(own).items():
            page = f"{name}/{module.removeprefix(name + '.')}"
            body = [heading(title_of(module), "="), f".. py:currentmodule:: {name}\n"]
            pages[page] = "\n".join([*body, *map(description, members)])
            text.append(f"   /{PAGES}/{page}")
    else:
        for module, members in sections(own).items():
            text.append(heading(title_of(module), "-"))
            text.extend(map(description, members))
    return {name: "\n".join(text) + "\n", **pages}


def write_pages(app: Sphinx) -> None:
    """Write the pages into the folder ``api`` beside the other pages, where they have changed."""
    by_package = {package: entries(package) for package in packages()}
    primary = documented(entry for listed in by_package.values() for entry in listed)
    pages: dict[str, str] = {}
    for package, listed in by_package.items():
        pages |= package_pages(package, listed, primary)
    rows = [
        f"   * - :py:mod:`{package.__name__}`\n     - {first_sentence(package.__doc__)}"
        for package in by_package
    ]
    tree = [f"   {package.__name__}" for package in by_package]
    pages["index"] = "\n".join(
        [
            heading("API", "="),
            "Each public name, by package. Other names may change without notice.\n",
            ".. list-table::\n   :widths: auto\n   :class: api-summary\n",
            *rows,
            "\n.. toctree::\n   :hidden:\n",
            *tree,
            "",
        ]
    )
    folder = pathlib.Path(app.srcdir) / PAGES
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.rglob("*.rst"):
        if path.relative_to(folder).with_suffix("").as_posix() not in pages:
            path.unlink()
    app.jaxrec_entries = [entry for listed in by_package.values() for entry in listed]
    app.jaxrec_documented = primary


def mend_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Change what the code's docstrings may have and reStructuredText does not read."""
    for number, line in enumerate(lines):
        line = plural_names(line)
        if line.startswith(":vartype"):  # a shape such as "*batch columns" is no emphasis
            line = line.replace("*", r"\*")
        lines[number] = line


def class_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, result: str
) -> tuple[str, str] | None:
    """Return the signature of ``__init__``, which the metaclass of Flax modules hides."""
    if what != "class" or not issubclass(value, nnx.Module):
        return ("", "") if getattr(value, "_is_protocol", False) else None
    if value.__init__ is object.__init__:
        return "()", ""
    found = sphinx_inspect.signature(value.__init__, bound_method=True)
    found = found.replace(
        parameters=[with_named_default(parameter) for parameter in found.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    return sphinx_inspect.stringify_signature(found, unqualified_typehints=True), result


def with_named_default(parameter: inspect.Parameter) -> inspect.Parameter:
    """Show a default such as ``<class 'jax.numpy.float32'>`` by its name, ``float32``."""
    if parameter.default is parameter.empty or "<" not in repr(parameter.default):
        return parameter
    return parameter.replace(default=Name(getattr(parameter.default, "__name__", "...")))


class Name(str):
    """A text that stands in a signature without quotes."""

    def __repr__(self) -> str:
        return str(self)


def note_other_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Let every public name of an object lead to its description; warn of names without one."""
    domain = env.domains.python_domain
    for entry in app.jaxrec_entries:
        target = app.jaxrec_documented[entry.key].full_name
        found = domain.objects.get(target)
        if found is None:
            LOGGER.warning("%s is public, but no page describes it", entry.full_name)
        elif not entry.text:
            LOGGER.warning("%s has no docstring", entry.full_name)
        if found is not None and entry.full_name not in domain.objects:
            domain.objects[entry.full_name] = found._replace(aliased=True)


def resolve_short_name(
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.Element
) -> nodes.Node | None:
    """Resolve a name in backticks that is public in another package than the text's."""
    if node.get("reftype") not in ("obj", "class", "exc", "func"):
        return None
    name = node["reftarget"].split("[")[0]
    targets = {
        app.jaxrec_documented[entry.key].full_name
        for entry in app.jaxrec_entries
        if entry.name == name
    }
    if len(targets) != 1:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], targets.pop(), node, content
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", mend_docstring, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", class_signature)
    app.connect("env-check-consistency", note_other_names)
    app.connect("missing-reference", resolve_short_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
