"""Log-probabilities of an answer whose tokens were sampled under several versions of a model, by transformers."""

import torch


@torch.no_grad()
def recomputed(models, prompt, tokens, switches):
    """Returns the log-probability of each token under the model of its version, which computes all of the context.

    `switches` are the places of the first tokens of all versions but the first.
    """
    edges = [0, *switches, len(tokens)]
    parts = []
    for model, start, stop in zip(models, edges, edges[1:], strict=False):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        parts.append(_chosen(logits, tokens)[start:stop])
    return torch.cat(parts)


@torch.no_grad()
def with_stale_cache(models, prompt, tokens, switches):
    """Returns the log-probability of each token under the model of its version, with the keys and values of the context
    as earlier versions computed them."""
    ids = torch.tensor([prompt + tokens])
    seen, cache, logits = 0, None, []
    for model, switch in zip(models, [*switches, None], strict=True):
        stop = ids.size(1) if switch is None else len(prompt) + switch - 1
        out = model(ids[:, seen:stop], past_key_values=cache, use_cache=True)
        seen, cache = stop, out.past_key_values
        logits.append(out.logits)
    return _chosen(torch.cat(logits, 1)[0, len(prompt) - 1 : -1], tokens)


def _chosen(logits, tokens):
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
