"""Log-probabilities of sampled tokens, by a trainer rank or by transformers in float32; started by precision.py.

python tools/bench/precision_logprobs.py trainer|transformers RUN
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from areal_megatron.config import Config, config_file
from areal_megatron.data.trajectory import BatchPart, decoder
from areal_megatron.run.folder import Run
from tools.bench.precision import BATCH


def of_trainer(config: Config, run: Run, part: BatchPart) -> torch.Tensor:
    from areal_megatron.trainer.trainer import Trainer

    with Trainer(config, run, rank=0) as trainer:
        return trainer.ppo.logprobs(part)


@torch.no_grad()
def of_transformers(config: Config, _: Run, part: BatchPart) -> torch.Tensor:
    """The weights are those of model.dtype, and everything is computed in float32."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype, local_files_only=True)
    model = model.float().to(device).eval()
    found = []
    for index in (i for microbatch in part.members[0] for i in microbatch):
        trajectory = part.trajectories[index]
        row = torch.from_numpy(np.concatenate((trajectory.prompt, trajectory.response))).long().to(device)
        logits = model(row[None], logits_to_keep=len(trajectory.response) + 1).logits[0, :-1]
        chosen = row[len(trajectory.prompt) :, None]
        found.append(torch.log_softmax(logits / config.rollout.temperature, -1).gather(1, chosen)[:, 0])
    return torch.cat(found)


def main() -> None:
    by, run = sys.argv[1], Run(sys.argv[2])
    config = config_file.load(run.config)
    part = decoder(BatchPart).decode((run.folder / BATCH).read_bytes())
    compute = {"trainer": of_trainer, "transformers": of_transformers}[by]
    np.save(run.folder / f"{by}.npy", compute(config, run, part).cpu().numpy())


if __name__ == "__main__":
    main()
