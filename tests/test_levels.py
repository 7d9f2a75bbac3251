"""The rooms of the package stand on levels: a module imports from lower levels only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import loosestep

ROOT = Path(loosestep.__file__).parent
LEVELS = {
    0: ["registry", "core.keys"],
    1: [
        "events",
        "units",
        "storage",
        "version",
        "codecs",
        "topology",
        "core.errors",
        "core.pending",
        "core.plain_state",
        "core.plain_torch",
        "core.stopping",
        "core.store",
    ],
    2: ["core.thread", "core.contracts", "core.messages", "record", "launch", "recipes"],
    3: ["core.collectives", "core.replica", "lab"],
    4: ["strategies", "core.gossip"],
    5: ["core.world", "runfolder"],
    6: ["core.engines", "report"],
    7: ["attachment", "sim"],
    8: ["", "training", "integrations"],  # "": the names that users import
    9: ["cli"],
}
# what the user touches, side by side in the root
SAME_ROOM = {"run": "attachment", "mesh": "attachment", "__main__": "cli"}
ROOMS = {room: level for level, rooms in LEVELS.items() for room in rooms}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `loosestep`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, at its top, inside its functions or for
    its types.
    """
    package = ["loosestep", *filter(None, name.split("."))]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            targets = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "loosestep":
                inner = target.removeprefix("loosestep").removeprefix(".")
                yield inner if inner in known else inner.rpartition(".")[0]


def room_of(name: str) -> str:
    """The room that a module stands in: the longest listed prefix of its name."""
    if not name:
        return ""
    parts = SAME_ROOM.get(name, name).split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next(
        (prefix for prefix in prefixes if prefix in ROOMS), f"no level says where {name} stands"
    )


def edges() -> list[tuple[str, str]]:
    known = modules()
    return [(name, target) for name, path in known.items() for target in imports(name, path, known)]


def test_every_module_stands_in_a_room():
    # The packages above the rooms hold nothing but a sentence.
    assert {name for name in modules() if room_of(name) not in ROOMS} == {"core"}


def test_a_module_imports_from_lower_levels_only():
    upwards = {
        (name, target)
        for name, target in edges()
        if room_of(name) != room_of(target) and ROOMS[room_of(name)] <= ROOMS[room_of(target)]
    }
    assert not upwards


def test_the_test_sees_imports_of_every_form():
    known = modules()
    assert "sim.driver" in set(imports("", known[""], known))  # for types only
    # relative
    assert "recipes.errors" in set(
        imports("recipes.acoustic.decode", known["recipes.acoustic.decode"], known)
    )
    assert "lab" in set(imports("", known[""], known))  # a module taken from its package
