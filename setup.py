"""Packages of areal_megatron; exact versions of all packages are in requirements-cpu.lock and requirements-gpu.lock."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = runpy.run_path("areal_megatron/run/extras.py")["EXTRAS"]
SERVING = ["prometheus-client", "starlette", "uvicorn", "uvloop"]
"""What our part of vLLM's server imports beside vLLM, which requires them."""

setup(
    name="areal_megatron",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language models with Megatron-core trainers and vLLM engines",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"": "."},  # an editable install makes tools and tests importable too
    packages=find_packages(include=["areal_megatron*"]),  # launch/ too, by the link areal_megatron/launch
    package_data={
        "areal_megatron.launch": ["manifests/*.yaml"],
        "areal_megatron.page": ["page.html", "page.css", "page.js"],
    },
    install_requires=[
        "aiohttp",
        "argcomplete",
        "cryptography",
        "httpx2",
        "huggingface-hub>=2.4",
        "jinja2",
        "mpmath",
        "msgspec",
        "numpy",
        "omegaconf",
        "packaging",
        "protobuf",
        "psutil",
        "pyarrow",
        "pyyaml",
        "pyzmq",
        "rich",
        "tensorboard",
        "tokenizers",
        "transformers",
        "zstandard",
    ],
    extras_require={
        **EXTRAS,
        "cpu": EXTRAS["cpu"] + SERVING,
        "gpu": EXTRAS["gpu"] + SERVING,
        "docs": ["furo==2025.12.19", "myst-parser==5.2.0", "sphinx==9.0.4"],  # `make docs`
        "bench": ["matplotlib"],  # pictures of tools/bench
        "mpi": ["mpi4py==4.1.2"],
    },
    entry_points={
        "console_scripts": ["areal = areal_megatron.command:main"],
        # vLLM loads this in its API server, engine core and every worker: it registers our weight transfer backend.
        "vllm.general_plugins": ["areal_megatron = areal_megatron.engine.plugin:register"],
    },
)
