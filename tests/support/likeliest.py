"""The likeliest answer of transformers' model."""

import torch


def likeliest(model, prompt, stop, length):
    """Returns the likeliest answer of at most `length` tokens, with the token that ends it."""
    tokens = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens = torch.cat((tokens, model(tokens[None]).logits[0, -1].argmax()[None]))
            if int(tokens[-1]) in stop:
                break
    return tokens[len(prompt) :].tolist()
