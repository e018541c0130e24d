"""Packages of areal_megatron; exact versions of all packages are in requirements-cpu.lock and requirements-gpu.lock."""

import runpy

from setuptools import find_packages, setup

setup(
    name="areal_megatron",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language models with Megatron-core trainers and vLLM engines",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "."},  # an editable install makes tools and tests importable too
    packages=find_packages(include=["areal_megatron*"]),  # launch/ too, by the link areal_megatron/launch
    package_data={"areal_megatron.launch.page": ["page.html", "page.css", "page.js"]},
    install_requires=[
        "aiohttp",
        "huggingface-hub>=2.4",
        "argcomplete",
        "cryptography",
        "mpmath",
        "msgspec",
        "numpy",
        "omegaconf",
        "packaging",
        "psutil",
        "pyarrow",
        "pyzmq",
        "rich",
        "safetensors",
        "tensorboard",
        "transformers",
        "zstandard",
    ],
    extras_require={
        **runpy.run_path("areal_megatron/extras.py")["EXTRAS"],  # cpu, gpu, te
        "docs": ["furo==2025.12.19", "myst-parser==5.2.0", "sphinx==9.0.4"],  # `make docs`
        "bench": ["matplotlib"],  # pictures of tools/bench
        "mpi": ["mpi4py==4.1.2"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow-skinny", "sqlalchemy", "alembic"],  # `mlflow ui`, its page, needs mlflow
        "swanlab": ["swanlab"],
        "trackio": ["trackio"],
    },
    entry_points={
        "console_scripts": ["areal = areal_megatron.command:main"],
        # vLLM loads this in its API server, engine core and every worker: it registers our weight transfer backend.
        "vllm.general_plugins": ["areal_megatron = areal_megatron.engine.plugin:register"],
    },
)
