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


def scored(service):
    """Returns what a sampler of the model itself tells of a prompt: log-probabilities in three ways, and the likeliest
    tokens."""
    sampler, prompt = service.create_sampling_client(base_model="model"), [3, 4, 5, 11, 3, 8, 8]
    text, parameters = types.ModelInput.from_ints(prompt), types.SamplingParams(max_tokens=2, temperature=0.7)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    answered = sampler.sample(text, 2, parameters, **asked).result()
    last = sampler.sample(text, 1, parameters, **asked, prompt_logprobs_last_n=2).result()
    likely = sampler.sample(text, 1, parameters, topk_prompt_logprobs=1).result()
    single = types.ModelInput.from_ints(prompt[:1])
    return {
        "prompt": prompt,
        "computed": sampler.compute_logprobs(text).result(),
        "sampled": [len(sequence.tokens) for sequence in answered.sequences],
        "included": answered.prompt_logprobs,
        "likely": answered.topk_prompt_logprobs,
        "last": [last.prompt_logprobs, last.topk_prompt_logprobs],
        "likely_alone": [likely.prompt_logprobs, likely.topk_prompt_logprobs],
        "single": sampler.compute_logprobs(single).result(),
        "wrong": [
            refused(lambda: sampler.sample(text, 1, parameters, topk_prompt_logprobs=21).result()),
            refused(lambda: sampler.sample(text, 1, parameters, topk_sample_logprobs=1).result()),
            refused(lambda: sampler.compute_logprobs(text, prompt_logprobs_last_n=len(prompt)).result()),
        ],
    }


def lesson(training, answer, steps=4):
    """Trains with two gradients a step; yields after every call, at last what trainers and a sampler say of a prompt
    after each step."""
    found, probe = [], [3, 4, 5, 11, 3, 8]
    text, scored = types.ModelInput.from_ints(probe), datum(probe[:1], probe[1:], weights=[1.0] * 5)
    for step in range(steps):
        for half in range(2):
            random.seed(10 * step + half)
            prompts = [[random.randrange(3, 9) for _ in range(4)] for _ in range(4)]
            batch = [datum(prompt, answer, weights=[1.0] * len(answer)) for prompt in prompts]
            training.forward_backward(batch, "cross_entropy").result()
            yield
        training.optim_step(ADAM).result()
        yield
        told = training.forward([scored], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        yield
        sampler = training.save_weights_and_get_sampling_client().result()
        found.append([told, sampler.compute_logprobs(text).result()[1:]])
        yield
    yield found


def side_by_side(service):
    """Trains two models one after the other, then two call by call in turns, and tells what became of each, and of a
    model more than there is room for."""
    lessons = [8, 6, 4, 7, END], [5, 5, 3, END]
    alone = []
    for answer in lessons:
        one = tinker.ServiceClient()
        alone.append([*lesson(client(one), answer)][-1])
        one.close("success").result()
    other = tinker.ServiceClient()
    models = [client(service), client(other)]
    running = [lesson(model, answer) for model, answer in zip(models, lessons, strict=True)]
    turns = [*zip(*running, strict=True)]
    saved = models[0].save_state("one").result().path
    for model in models:
        model.save_weights_for_sampler("last").result()
    crowded = refused(lambda: client(service))
    other.close("success").result()
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    after = [[*lesson(model, lessons[1], 1)][-1] for model in (models[0], again)]
    return {"alone": alone, "turns": turns[-1], "crowded": crowded, "after": after}


def refused(call):
    """Returns the line of the error that a call ends with."""
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def mistakes(service):
    """Returns what becomes of wrong input, of an older sampler, and of a saved state."""
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
    later = service.create_sampling_client(model_path=path)
    samples = later.sample(text, 2, parameters).result().sequences
    told = [each.compute_logprobs(text).result()[1] for each in (sampler, later)]
    wrong = {
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
    second.load_state_with_optimizer(saved).result()
    return {
        "wrong": wrong,
        "told": told,
        "begun": [begun, anew],
        "saved": [at_save, probe(second)],
        "sampled": [len(sequence.tokens) for sequence in samples],
    }


def main(what):
    service = tinker.ServiceClient()
    if what == "supervised":
        found = supervised(service)[1]
    elif what == "reinforced":
        found = reinforced(service)[1]
    elif what == "scored":
        found = scored(service)
    elif what == "side_by_side":
        found = side_by_side(service)
    else:
        found = mistakes(service)
    service.close("success").result()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
