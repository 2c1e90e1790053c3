#!/usr/bin/env python3
"""Prints the size and shape of the code base, to compare two checkouts.

Usage: python .ci/house.py [CHECKOUT] [--since COMMIT]

Needs Python alone: nothing is imported. Prints, for each package and for all of ``jaxrec``, the
number of files, lines, lines of code (without docstrings, comments, imports and blank lines), lines
of docstrings and of comments, and public names; then the ``isinstance`` of concrete table stores
outside of the modules that define them, the methods of `TableStore`, and the names that a package
exports although a module of it has the same name.

``--since`` sets apart what was written after a commit, such as new features: it prints how many of
the files and of the lines of code were there already, by ``git diff`` and ``git blame``. A line
counts as new if a later commit changed it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import pathlib
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator

STORE = re.compile(r"^(\w*Tables|MeshStore|TierStore|QuantizedStore|CachedTables)$")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass
class Sizes:
    """Sizes of some files, in lines but for the number of files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0
    names: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Sizes(*(a + b for a, b in pairs))


def file_lines(text: str) -> tuple[set[int], set[int], set[int]]:
    """Return the numbers of a file's lines of code, docstrings and comments.

    A line of code with a comment behind it is in both.
    """
    tree = ast.parse(text)
    docstrings = set(_lines_of(_docstrings(tree)))
    imports = set(
        _lines_of(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    )
    comments, code = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.string.strip() and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docstrings - imports, docstrings, comments


def file_sizes(text: str) -> Sizes:
    """Return the sizes of one file."""
    code, docstrings, comments = map(len, file_lines(text))
    return Sizes(1, len(text.splitlines()), code, docstrings, comments)


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield docstrings of definitions, and strings that stand behind a field."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(node, DEFINITIONS) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement


def _lines_of(nodes: Iterator[ast.AST]) -> Iterator[int]:
    for node in nodes:
        yield from range(node.lineno, node.end_lineno + 1)


def exported(init: pathlib.Path) -> tuple[set[str], set[str]]:
    """Return the names that an ``__init__.py`` exports, and those that hide their module."""
    names, hiding = set(), set()
    for node in ast.parse(init.read_text()).body:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("jaxrec"):
            own = {each.asname or each.name for each in node.names}
            names |= {name for name in own if not name.startswith("_")}
            parent, _, last = module.rpartition(".")
            hiding |= own & {last} if parent.endswith(init.parent.name) else set()
    return names, hiding


def store_checks(tree: ast.Module) -> int:
    """Return the number of ``isinstance`` on stores that the file does not define itself."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            count += any(STORE.match(name) and name not in own for name in names)
    return count


def store_methods(tree: ast.Module) -> tuple[int, int]:
    """Return the numbers of methods and properties of `TableStore`: all, and the abstract ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "TableStore":
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            abstract = [
                each for each in methods if "abstractmethod" in ast.unparse(each).split("def ")[0]
            ]
            return len(methods), len(abstract)
    return 0, 0


def there_before(root: pathlib.Path, commit: str) -> tuple[int, int]:
    """Return the numbers of files and of lines of code that were there at a commit."""

    def git(*arguments: str) -> list[str]:
        command = ["git", *arguments, "--", "jaxrec"]
        run = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        return run.stdout.splitlines()

    # A file that was renamed, and edited on the way, is not a new one.
    added = git("diff", "--name-only", "--diff-filter=A", "-M40%", "-l0", commit)
    files = {path for path in git("ls-files") if path.endswith(".py")}
    lines = 0
    for path in sorted(files):
        code, _, _ = file_lines((root / path).read_text())
        command = ["git", "blame", "-s", "-w", f"{commit}..", "--", path]
        run = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        blamed = enumerate(run.stdout.splitlines(), start=1)
        lines += sum(line.startswith("^") for number, line in blamed if number in code)
    return len(files - {*added}), lines


def main(root: pathlib.Path, since: str | None) -> None:
    """Print the tables of a checkout."""
    package = root / "jaxrec"
    sizes: dict[str, Sizes] = defaultdict(Sizes)
    checks: dict[str, int] = {}
    methods = (0, 0)
    shadowed = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        top = relative.parts[0] if len(relative.parts) > 1 else "(top)"
        text = path.read_text()
        tree = ast.parse(text)
        sizes[top] += file_sizes(text)
        if count := store_checks(tree):
            checks[str(relative)] = count
        if relative == pathlib.Path("embed/store.py"):
            methods = store_methods(tree)
        if path.name == "__init__.py":
            names, hiding = exported(path)
            if len(relative.parts) <= 2:
                sizes[top] += Sizes(names=len(names))
            shadowed += [f"{path.parent.relative_to(root)}/{name}" for name in sorted(hiding)]
    sizes["all"] = sum(sizes.values(), Sizes())
    header = ["package", *(field.name for field in dataclasses.fields(Sizes)), "comment %"]
    print(("{:<10}" + "{:>11}" * 7).format(*header))
    for name, each in sizes.items():
        share = f"{100 * each.comments / max(1, each.lines):.2f}"
        print(("{:<10}" + "{:>11}" * 7).format(name, *dataclasses.astuple(each), share))
    print(f"\nisinstance of stores: {sum(checks.values())}")
    for name, count in checks.items():
        print(f"  {name}: {count}")
    print(f"methods of TableStore: {methods[0]}, of them to implement: {methods[1]}")
    print(f"functions or classes that hide a module: {len(shadowed)}")
    for name in shadowed:
        print(f"  {name}")
    if since is not None:
        files, lines = there_before(root, since)
        print(f"there at {since}: {files} of the files, {lines} of the lines of code")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "checkout", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).parents[1]
    )
    parser.add_argument("--since", help="commit after which lines are new")
    options = parser.parse_args()
    main(options.checkout.resolve(), options.since)
