"""Loops of a program that uses the tinker package, as it is published, with a server of this project: the address and
the key are in the environment. Prints what the tests look at, a line of JSON."""

import json
import random
import sys

import numpy as np
import tinker
from tinker import types

END = 1
WANTED = 7
"""The token that the RL loop rewards."""
ADAM, FAST = (types.AdamParams(learning_rate=rate) for rate in (5e-3, 2e-2))


def datum(prompt, tokens, **columns):
    whole = [*prompt, *tokens]
    before = [0.0] * (len(prompt) - 1)
    given = {name: [*before, *values] for name, values in columns.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": whole[1:], **given}
    )


def client(service):
    return service.create_lora_training_client(base_model="model", rank=8).result()


def supervised(service, steps=40):
    """Teaches a model one answer to all prompts; returns the losses a token, by what the server sums, and by its
    log-probabilities."""
    training, found = client(service), []
    for step in range(steps):
        random.seed(step)
        prompts = [[random.randrange(3, 9) for _ in range(4)] for _ in range(32)]
        batch = [datum(prompt, [8, 6, 4, 7, END], weights=[1.0] * 5) for prompt in prompts]
        computed, stepped = training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)
        result = computed.result()
        stepped.result()
        own = -sum(np.sum(out["logprobs"].data[3:]) for out in result.loss_fn_outputs)
        found.append([result.metrics["loss:sum"] / (32 * 5), own / (32 * 5)])
    return training, found


def reinforced(service, iterations=15):
    """Rewards a token; returns the mean reward of each iteration."""
    training, found, prompt = client(service), [], [3, 4, 5]
    for _ in range(iterations):
        sampler = training.save_weights_and_get_sampling_client().result()
        parameters = types.SamplingParams(max_tokens=8, temperature=1.0)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), 16, parameters) for _ in range(4)]
        sequences = [sequence for future in asked for sequence in future.result().sequences]
        rewards = np.array([np.mean(np.array(sequence.tokens) == WANTED) for sequence in sequences])
        found.append(float(rewards.mean()))
        gains = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        batch = [
            datum(prompt, own.tokens, logprobs=own.logprobs, advantages=[gain / len(own.tokens)] * len(own.tokens))
            for own, gain in zip(sequences, gains, strict=True)
        ]
        training.forward_backward(batch, "importance_sampling").result()
        training.optim_step(FAST).result()
    return training, found


def refused(call):
    """Returns the line of the error that a call ends with."""
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def mistakes(service):
    """Returns what becomes of wrong input, of a model that another one has replaced, and of a saved state."""
    first = client(service)
    good = datum([3, 4], [5, 6], weights=[1.0, 1.0])

    def probe(training):
        return training.forward([good], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data

    begun = probe(first)
    first.forward_backward([good], "cross_entropy").result()
    first.optim_step(ADAM).result()
    saved, at_save = first.save_state("mine").result().path, probe(first)
    sampler = first.save_weights_and_get_sampling_client().result()
    first.forward_backward([good], "cross_entropy").result()
    first.optim_step(ADAM).result()
    path = first.save_weights_for_sampler("other").result().path
    parameters = types.SamplingParams(max_tokens=3, temperature=1.0)
    text = types.ModelInput.from_ints([3, 4])
    samples = service.create_sampling_client(model_path=path).sample(text, 2, parameters).result().sequences
    wrong = {
        "stale": refused(lambda: sampler.sample(text, 1, parameters).result()),
        "loss": refused(lambda: first.forward_backward([good], "dro").result()),
        "lacking": refused(lambda: first.forward_backward([good], "ppo").result()),
        "length": refused(
            lambda: first.forward_backward(
                [types.Datum(model_input=text, loss_fn_inputs={"target_tokens": [4, 5, 6]})], "cross_entropy"
            ).result()
        ),
        "shift": refused(
            lambda: first.forward_backward(
                [types.Datum(model_input=text, loss_fn_inputs={"target_tokens": [9, 5]})], "cross_entropy"
            ).result()
        ),
        "adam": refused(lambda: first.optim_step(types.AdamParams(learning_rate=1e-3, beta2=0.5)).result()),
        "rank": refused(lambda: service.create_lora_training_client(base_model="model", rank=9).result()),
        "base": refused(lambda: service.create_lora_training_client(base_model="nobody/has-it", rank=8).result()),
        "path": refused(
            lambda: (
                service.create_sampling_client(model_path="tinker://a/sampler_weights/b")
                .sample(text, 1, parameters)
                .result()
            )
        ),
    }
    second = client(service)
    anew = probe(second)
    wrong["replaced"] = refused(lambda: first.forward_backward([good], "cross_entropy").result())
    third = service.create_training_client_from_state_with_optimizer(saved).result()
    return {
        "wrong": wrong,
        "begun": [begun, anew],
        "saved": [at_save, probe(third)],
        "sampled": [len(sequence.tokens) for sequence in samples],
    }


def main(what):
    service = tinker.ServiceClient()
    if what == "supervised":
        found = supervised(service)[1]
    elif what == "reinforced":
        found = reinforced(service)[1]
    else:
        found = mistakes(service)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
