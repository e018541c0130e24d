import hashlib
import json
import random
import re

import pytest
from math_verify import parse, verify
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import make_arithmetic


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_arithmetic.make_world(folder, seed=3)
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def total(prompt):
    a, b = re.fullmatch(r"(\d\d)\+(\d\d)=", prompt).groups()
    return int(a) + int(b)


def test_held_out_prompts_are_in_neither_training_file(world):
    heldout = {line["prompt"] for line in lines(world / "heldout.jsonl")}
    assert len(heldout) >= 500
    assert heldout == {line["prompt"] for line in lines(world / "heldout-pairs.jsonl")}
    for name in ("train.jsonl", "sft.jsonl", "pairs.jsonl"):
        assert heldout.isdisjoint(line["prompt"] for line in lines(world / name))


def test_answers_are_the_sums(world):
    for name in ("train.jsonl", "heldout.jsonl"):
        assert all(int(line["answer"]) == total(line["prompt"]) for line in lines(world / name))


def test_of_two_answers_the_chosen_one_is_right(world):
    pairs = lines(world / "pairs.jsonl")
    for pair in pairs:
        result = f"\\boxed{{{total(pair['prompt'])}}}"
        assert pair["chosen"].endswith(result) and not pair["rejected"].endswith(result)
    assert 0.15 < sum(pair["rejected"].startswith("\\boxed") for pair in pairs) / len(pairs) < 0.25  # hasty ones


def test_verdicts_are_those_of_the_exact_sum(world):
    rows = lines(world / "judge.jsonl")
    right = 0
    for row in rows:
        a, b, answer, told = re.fullmatch(
            r"(\d\d)\+(\d\d)=.*\\boxed\{(\d+)\}=.*\\boxed\{(\d+)\}", row["prompt"] + row["response"][:-2]
        ).groups()
        assert int(told) == int(a) + int(b)
        assert row["response"][-2:] == ("=1" if answer == told else "=0")
        right += answer == told
    assert 0.48 < right / len(rows) < 0.52
    heldout = {line["prompt"] for line in lines(world / "heldout.jsonl")}
    assert heldout.isdisjoint(row["prompt"][:6] for row in rows)


def test_about_half_of_the_corpus_is_wrong_as_math_verify_sees_it(world):
    sample = random.Random(0).sample(lines(world / "sft.jsonl"), 500)
    right = [verify(parse(str(total(line["prompt"]))), parse(line["response"])) for line in sample]
    assert 0.40 < sum(right) / len(right) < 0.53


def test_a_good_answer_is_always_right_and_a_slipped_one_never():
    for a in range(10, 100, 7):
        for b in range(10, 100):
            assert make_arithmetic.good_answer(a, b).endswith(f"\\boxed{{{a + b}}}")
            assert not make_arithmetic.slipped_answer(a, b).endswith(f"\\boxed{{{a + b}}}")


def test_tokenizer_keeps_every_text_and_the_model_fits_it(world):
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    for line in lines(world / "sft.jsonl")[:300]:
        text = line["prompt"] + line["response"]
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids and tokenizer.eos_token_id not in ids
        assert tokenizer.decode(ids) == text
    model = AutoModelForCausalLM.from_pretrained(world / "model")
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.5e6
    assert model.config.head_dim == 32 and model.config.vocab_size == len(tokenizer) == 64
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_seed_decides_everything(world, tmp_path):
    def digest(folder):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    make_arithmetic.make_world(tmp_path, seed=3)
    assert digest(tmp_path) == digest(world)
    assert make_arithmetic.make_data(4)["heldout.jsonl"] != lines(world / "heldout.jsonl")
