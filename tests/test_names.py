"""No comprehension takes a name that the rest of its function knows as the module's.

Python 3.12 has a comprehension in the function itself, and of two that are nested it takes the inner one's variable for
one of the whole function: what is the module's is "not associated with a value" there (python/cpython, 3.12.1 to 3.12.3
at least). Other versions do as they should, and would not show it.
"""

import ast
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
NESTED = """
import json as rows
def tell(served, requests):
    shapes = [[(rows, 1) for rows in one] for one in served]
    return [rows.dumps for one in requests]
"""


def names_of_the_module(tree: ast.Module) -> set[str]:
    """Imported, defined and set at its top, below a condition too."""
    names: set[str] = set()
    for node in tree.body:
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        for part in ast.walk(node):
            if isinstance(part, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in part.names}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def taken_twice(source: str) -> set[str]:
    """Names of a module that a function uses, and a comprehension in it has as its variable."""
    tree, found = ast.parse(source), set[str]()
    of_module = names_of_the_module(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            comprehensions = [n for n in ast.walk(function) if isinstance(n, ast.ListComp | ast.SetComp | ast.DictComp)]
            variables = {
                (name.id, comprehension)
                for comprehension in comprehensions
                for generator in comprehension.generators
                for name in ast.walk(generator.target)
                if isinstance(name, ast.Name) and name.id in of_module
            }
            for taken, comprehension in variables:
                inside = {id(node) for node in ast.walk(comprehension)}
                used = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == taken)
                found |= {taken for node in used if id(node) not in inside}
    return found


def test_one_is_found():
    assert taken_twice(NESTED) == {"rows"}


def test_no_comprehension_takes_a_name_of_its_module():
    paths = sorted(SOURCES.rglob("*.py"))
    assert {str(path.relative_to(SOURCES)): names for path in paths if (names := taken_twice(path.read_text()))} == {}
