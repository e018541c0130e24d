"""Writes train.jsonl and heldout.jsonl beside this file: GSM8K, whose prompts also tell the model about its tool.

`python -m examples.python_tool.make_data` reads the hub; `… TRAIN HELDOUT` any other data of mathematics.
"""

import json
import sys
from pathlib import Path

from areal_megatron.data.files import fetch, records
from areal_megatron.data.formats import read_item

TOOL = (
    "\n\nYou may have Python compute: write a program that prints what you want to know into one ```python block, and "
    "stop there. I run it and answer with what it has printed. Give your final answer without a program."
)
FOLDER = Path(__file__).parent


def main(train: str = "openai/gsm8k:main/train", heldout: str = "openai/gsm8k:main/test") -> None:
    for name, source in (("train", train), ("heldout", heldout)):
        rows = []
        for record in records(fetch(source, name)):
            item = read_item(record.row, record.where, [1, record.id])
            rows.append({"prompt": f"{item.prompt}{TOOL}", "answer": item.answer})
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
