"""The table of rooms in docs/design.md is what the code does: who may import whom, and which heavy library."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"megatron", "mpi4py", "torch", "transformers", "vllm"}
EVERYBODY = "everybody"
"""The room of the files that every other room may import."""


def table():
    """Room → {room or library that it may import: the files that may, or all of them if none is named}."""
    text = (ROOT / "docs" / "design.md").read_text()
    row = r"^\| (`[^|]+`) \|[^|]*\|[^|]*\|([^|]*)\|$"
    allowed = r"`([^`]+)`(?: in ((?:`[^`]+`(?: and )?)+))?"
    return {
        name: {other: re.findall(r"`([^`]+)`", files) for other, files in re.findall(allowed, cell)}
        for names, cell in re.findall(row, text.partition("## Rooms")[2], re.M)
        for name in re.findall(r"`([^`]+)`", names)
    }


def modules():
    """Dotted name → file, of all that is installed."""
    files = (path for top in ("areal_megatron", "launch") for path in sorted((ROOT / top).rglob("*.py")))
    return {".".join(installed(path).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def installed(path):
    """Where the wheel has a file: launch/ is a folder of the package, as by the link areal_megatron/launch."""
    path = path.relative_to(ROOT)
    return "areal_megatron" / path if path.parts[0] == "launch" else path


MODULES = modules()
ROOMS = table()


def room_of(module):
    """The folder below areal_megatron, or the file at its top; launch/ and each of its folders."""
    path = MODULES[module].relative_to(ROOT)
    if path.parts[0] == "launch":
        return "/".join(path.parts[:-1]) + "/"
    return f"{path.parts[1]}{'/' * (len(path.parts) > 2)}"


def imported(nodes):
    """Dotted names that these nodes import: of our own modules, and of libraries their first name."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@cache
def trees():
    return {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


@cache
def every_import():
    """Module → what it imports, inside functions and under TYPE_CHECKING too."""
    return {module: set(imported(ast.walk(tree))) for module, tree in trees().items()}


@cache
def at_start():
    return {module: set(imported(tree.body)) for module, tree in trees().items()}


def test_every_file_has_a_room_and_every_room_a_file():
    assert {room_of(module) for module in MODULES} - {"__init__.py"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_row_allows(room):
    wrong = []
    for module, names in every_import().items():
        if room_of(module) != room:
            continue
        for name in names:
            other = room_of(name) if name in MODULES else name.partition(".")[0]
            if other == room or (name not in MODULES and other not in LIBRARIES):
                continue
            if other in ROOMS and EVERYBODY in ROOMS[other]:
                continue
            files = ROOMS[room].get(other)
            if files is None or (files and MODULES[module].name not in files):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    done = set()

    def visit(module, path):
        assert module not in path, f"a circle: {' → '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in every_import()[module] & MODULES.keys():
                visit(name, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


def test_the_house_is_no_higher_and_has_no_more_rooms_than_one_can_keep_in_mind():
    below = {room: set() for room in ROOMS}
    for module, names in every_import().items():
        own = room_of(module)
        below.get(own, set()).update({room_of(name) for name in names & MODULES.keys()} & ROOMS.keys() - {own})

    @cache
    def floor(room):
        return 1 + max(map(floor, below[room]), default=0)

    assert max(map(floor, ROOMS)) <= 10 and len(ROOMS) <= 28
    assert len([*(ROOT / "areal_megatron").glob("*.py")]) <= 6


def test_every_file_of_launch_starts_processes():
    """By Slurm, or by what supervises them; in launch/supervision/ is what all of these share."""
    starts = {"subprocess"} | {f"areal_megatron.launch.supervision.{name}" for name in ("hosts", "supervise")}
    files = {m for m, path in MODULES.items() if path.parent == ROOT / "launch" and path.name != "__init__.py"}
    assert files and {module for module in files if not every_import()[module] & starts} == set()


def test_nothing_in_the_package_imports_launch():
    launch = {module for module in MODULES if room_of(module).startswith("launch/")}
    assert {module for module in trees().keys() - launch if every_import()[module] & launch} == set()


@pytest.mark.parametrize("library", ["torch", "vllm", "megatron"])
def test_who_may_not_import_a_library_does_not_by_way_of_others(library):
    """A login node and the controller do without torch: also in what they import when they start."""

    def loads(module, seen):
        seen.add(module)
        names = at_start()[module]
        if any(name.partition(".")[0] == library for name in names):
            return [module]
        for name in names & MODULES.keys() - seen:
            if found := loads(name, seen):
                return [module, *found]
        return []

    for module in MODULES:
        room = room_of(module)
        if room != "__init__.py" and library not in ROOMS[room]:
            chain = loads(module, set())
            assert not chain, f"{' → '.join(chain)} → {library}"


def test_the_launcher_is_known_by_its_installed_name_alone():
    """`import launch`, which a checkout allows, would load its modules twice, and finds another's package elsewhere."""
    ours = (path for top in ("areal_megatron", "launch", "tests", "tools") for path in (ROOT / top).rglob("*.py"))
    import_of = re.compile(r"""^\s*(from launch(\.\w+)* import|import launch\b)|["']launch\.\w+["']""", re.M)
    assert [str(path.relative_to(ROOT)) for path in ours if import_of.search(path.read_text())] == []
