"""Makes the demo's world: an untrained tiny model, its tokenizer, and two-digit additions to learn.

A good answer shows its working, the sums of the columns from the right with the carry included, and then the result:
`47+85=` → `12 13 \\boxed{132}`. The corpus for the supervised warm start is imperfect, as real ones are: half of its
answers are hasty, with the tens alone and no working, and some workings contain a slip. The warm-started model imitates
both; RL, which only sees whether the result is right, has to discover that careful working pays. Everything follows
from the seed.

    python tools/make_arithmetic.py OUT_DIR [--seed 1] [--family qwen3|qwen2|qwen3_moe|glm4_moe|deepseek_v3|qwen3_5]

writes OUT_DIR/model/ (Hugging Face format), sft.jsonl (prompt, response), train.jsonl and heldout.jsonl (prompt,
answer), pairs.jsonl and heldout-pairs.jsonl (prompt, chosen, rejected: a good answer and a wrong one), and
judge.jsonl (prompt: an addition with an answer to it, response: the judge's own working and its verdict, 1 or 0). No
addition of heldout.jsonl or heldout-pairs.jsonl is in the others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

HASTY_RATE = 0.5
SLIP_RATE = 0.08
"""The share of slips among the answers that show their working."""
SFT_EXAMPLES = 40000
HELDOUT = 1000
VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789+= ", "\\boxed{", "}"]
VOCABULARY_SIZE = 64
"""Padded with reserved tokens: engines and tensor parallelism want a round size."""


def good_answer(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    return f"{ones} {tens} \\boxed{{{a + b}}}"


def hasty_answer(a: int, b: int) -> str:
    """Returns the tens alone, without working: right only if there are no ones."""
    return f"\\boxed{{{(a // 10 + b // 10) * 10}}}"


def slipped_answer(a: int, b: int) -> str:
    """Returns a working with the carry forgotten or made up, and so a wrong result."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + 1 - ones // 10
    return f"{ones} {tens} \\boxed{{{tens * 10 + ones % 10}}}"


def corpus_answer(a: int, b: int, rng: random.Random) -> str:
    if rng.random() < HASTY_RATE:
        return hasty_answer(a, b)
    return slipped_answer(a, b) if rng.random() < SLIP_RATE else good_answer(a, b)


def wrong_answer(a: int, b: int, rng: random.Random) -> str:
    """Returns an answer with a wrong result: hasty, with a slip, with other numbers in its working, or with another
    result than its working says. A reward model that knew the first two alone would be satisfied with any other."""
    right = good_answer(a, b)
    ones, tens, result = rng.randrange(19), rng.randrange(2, 20), rng.randrange(20, 199)
    kinds = [
        hasty_answer(a, b),
        slipped_answer(a, b),
        f"{ones} {right.split()[1]} \\boxed{{{int(right.split()[1]) * 10 + ones % 10}}}",
        f"{right.split()[0]} {tens} \\boxed{{{tens * 10 + (a + b) % 10}}}",
        f"{' '.join(right.split()[:2])} \\boxed{{{result}}}",
    ]
    return rng.choice([answer for answer in kinds if not answer.endswith(f"\\boxed{{{a + b}}}")])


def near_answer(a: int, b: int, rng: random.Random) -> str:
    """Returns an answer that is off by one in one place, and whose result follows from its working."""
    ones, tens = map(int, good_answer(a, b).split()[:2])
    if rng.random() < 0.5:
        tens += rng.choice((-1, 1))
    else:
        ones += rng.choice((-1, 1)) if ones else 1
    return f"{ones} {tens} \\boxed{{{tens * 10 + ones % 10}}}"


def make_pairs(sums: list[tuple[int, int]], rng: random.Random) -> list[dict[str, str]]:
    return [{"prompt": f"{a}+{b}=", "chosen": good_answer(a, b), "rejected": wrong_answer(a, b, rng)} for a, b in sums]


def make_verdicts(sums: list[tuple[int, int]], rng: random.Random) -> list[dict[str, str]]:
    """Returns what teaches a judge: of each addition an answer, as often right as wrong, and the verdict on it.

    Half of the wrong ones are nearly right: a policy learns to say whatever its judge does not tell from that.
    """
    rows = []
    for a, b in sums:
        right, wrong = rng.random() < 0.5, rng.choice((wrong_answer, near_answer))
        answer = good_answer(a, b) if right else wrong(a, b, rng)
        rows.append({"prompt": f"{a}+{b}={answer}=", "response": f"{good_answer(a, b)}={int(right)}"})
    return rows


def make_data(seed: int) -> dict[str, list[dict[str, str]]]:
    """Returns file name → lines."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    heldout, known = pairs[:HELDOUT], pairs[HELDOUT:]
    corpus = [known[i % len(known)] for i in range(SFT_EXAMPLES)]
    rng.shuffle(corpus)
    return {
        "sft.jsonl": [{"prompt": f"{a}+{b}=", "response": corpus_answer(a, b, rng)} for a, b in corpus],
        "train.jsonl": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in known],
        "heldout.jsonl": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in heldout],
        "pairs.jsonl": make_pairs(known, rng),
        "heldout-pairs.jsonl": make_pairs(heldout, rng),
        "judge.jsonl": make_verdicts(corpus, rng),
    }


def make_tokenizer(words: Sequence[str] = ()):
    """Returns a transformers tokenizer with a token for each character, and one for `\\boxed{`. `words` have tokens of
    their own; those in angle brackets, but for <think> and </think>, are a template's alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*VOCABULARY, *words]
    reserved = [f"<reserved-{i}>" for i in range(VOCABULARY_SIZE - len(known))]
    ids = {token: i for i, token in enumerate(known + reserved)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    whole = sorted((word for word in known if len(word) > 1), key=len, reverse=True)
    pieces = "|".join([*map(re.escape, whole), "."])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    speakers = [word for word in words if word.startswith("<") and "think" not in word]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=speakers, **named)


FAMILIES = ("qwen3", "qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_5")
"""What the model can be like: dense, without and with biases of attention; with experts; with dense layers and shared
experts beside them; with these and latent attention; with three gated delta nets before one layer with attention."""

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
}
_EXPERTS_OF_QWEN3 = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # the widths that engines have kernels for, this and 64
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,  # what is rotated, to transformers
    "v_head_dim": 32,
}
_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,  # vLLM's kernels take no smaller ones
    "linear_value_head_dim": 64,
}


def make_model(seed: int, family: str = "qwen3", **sizes: int):
    """Returns a randomly initialised model of one of FAMILIES in float32; the Qwen3 has 0.8 million parameters, unless
    `sizes` override its config."""
    import torch
    import transformers

    makers = {
        "qwen3": (transformers.Qwen3ForCausalLM, {}),
        "qwen2": (transformers.Qwen2ForCausalLM, {}),
        "qwen3_moe": (transformers.Qwen3MoeForCausalLM, _EXPERTS_OF_QWEN3),
        "glm4_moe": (transformers.Glm4MoeForCausalLM, {**_EXPERTS, "use_qk_norm": True}),
        "deepseek_v3": (transformers.DeepseekV3ForCausalLM, {**_EXPERTS, **_LATENTS}),
        "qwen3_5": (transformers.Qwen3_5ForCausalLM, _NETS),
    }
    make, own = makers[family]
    torch.manual_seed(seed)
    config = make.config_class(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=VOCABULARY.index("<pad>"),
        eos_token_id=VOCABULARY.index("<eos>"),
        dtype="float32",
        **(_SIZES | own | sizes),
    )
    return make(config).to(torch.float32)


def save_model(folder: Path, seed: int, family: str = "qwen3", **sizes: int) -> None:
    """Writes the untrained model with its tokenizer as a Hugging Face folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_model(seed, family, **sizes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_world(out: Path, seed: int, family: str = "qwen3") -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_model(out / "model", seed, family)
    for name, lines in make_data(seed).items():
        (out / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    arguments = parser.parse_args()
    make_world(arguments.out, arguments.seed, arguments.family)
    print(f"{arguments.out}: model, {SFT_EXAMPLES} SFT examples, {HELDOUT} held-out prompts")


if __name__ == "__main__":
    main()
