"""Where the project unpickles: nothing that has come over a network."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COLLECTIVES = {"all_gather", "gather", "broadcast", "scatter", "send", "recv", "reduce"}
UNPICKLERS = {
    "areal_megatron/checkpoint/torch_dist_metadata.py": "files, and everything but shapes becomes an inert object",
    "areal_megatron/trainer/objects.py": "what ranks have signed",
}
"""The files that may unpickle, and what."""


def test_no_code_of_ours_shares_python_objects_or_unpickles_what_others_send():
    collectives, unpicklers = [], set()
    for path in (path for room in ("areal_megatron", "launch", "tools") for path in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if called.removesuffix("_list").removesuffix("_object") in COLLECTIVES and "_object" in called:
                collectives.append(f"{name}:{node.lineno}: {called}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {
                "pickle.load",
                "pickle.loads",
                "pickle.Unpickler",
            }:
                unpicklers.add(name)
            if isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) == "False":
                unpicklers.add(name)
    assert collectives == []
    assert unpicklers == set(UNPICKLERS)
