"""One assignment a statement: `a, b = b, a` is a swap, and a call or a name may be unpacked;
nothing else has several targets.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
DISPLAYS = (ast.Tuple, ast.List)


def parallel(tree: ast.AST) -> Iterator[ast.Assign]:
    """Assignments of several values to several targets that do not swap them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            several = isinstance(target, DISPLAYS) and isinstance(node.value, DISPLAYS)
            if several and names(target) != names(node.value):
                yield node


def names(display: ast.expr) -> list[str]:
    assert isinstance(display, DISPLAYS)
    return sorted(ast.unparse(element) for element in display.elts)


def test_no_assignment_has_several_targets_and_values():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in parallel(ast.parse(path.read_text()))
    ]
    assert found == []


def test_the_test_tells_parallel_assignments_from_swaps_and_unpacking():
    refused = ["a, b = 1, 2", "self.a, self.b = x, y", "[a, b] = [b, c]", "a = b, c = 1, 2"]
    allowed = ["a, b = b, a", "a, b = f()", "a, b = pair", "for a, b in c: pass", "a = b = 1"]
    assert all(list(parallel(ast.parse(line))) for line in refused)
    assert not any(list(parallel(ast.parse(line))) for line in allowed)
