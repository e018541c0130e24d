"""τ²-bench's package for tests, and its own tasks in the form in which AReaL-tau2-data publishes its tasks."""

import os
import subprocess
import sys
import textwrap

from areal_megatron.workflows.environments import tau2_bench

FILE = tau2_bench.__file__
_WRITER = textwrap.dedent("""
    import json, sys
    from pathlib import Path

    from tau2.registry import registry

    folder = Path(sys.argv[1])
    (folder / "tau2_rl_database").mkdir()
    for domain in ("airline", "retail", "telecom"):
        database = f"tau2_rl_database/tau2_{domain}_db.json"
        held = registry.get_env_constructor(domain)().tools.db
        (folder / database).write_text(held.model_dump_json())
        for task in registry.get_tasks_loader(domain)("base")[:3]:
            said = task.model_dump(mode="json")
            said |= {"id": f"{domain}_{task.id}", "db_path": database}
            print(json.dumps(said | {"evaluation_criteria": json.dumps(said["evaluation_criteria"])}))
""")


def python(packages, *arguments, **settings):
    """Runs Python with the package, which tests install into a folder."""
    own = {"PYTHONPATH": str(packages), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300, **settings)


def published(packages, folder):
    """Writes tasks of three domains with their databases, and returns the file."""
    file = folder / "tau2_rl_train.jsonl"
    done = python(packages, "-c", _WRITER, folder)
    assert done.returncode == 0, done.stderr
    file.write_text(done.stdout)
    return file


def published_rows(packages, folder):
    """Returns a file with their rows."""
    rows = folder / "rows.jsonl"
    done = python(packages, FILE, "rows", published(packages, folder))
    assert done.returncode == 0, done.stderr
    rows.write_text(done.stdout)
    return rows
