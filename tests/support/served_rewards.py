"""Rewards of the user's that ask served models."""

from areal_megatron.reward.asking import ask
from areal_megatron.reward.served import ServedModelError


def by_judge(prompt: str, response: str, answer: str) -> float:
    """The share of three answers of the judge that have a digit of the right answer."""
    said = ask("judge", [{"role": "user", "content": f"1+{prompt}{response}"}], n=3, most_tokens=6)
    return sum(any(digit in one.text for digit in answer) for one in said) / 3


def careless(prompt: str, response: str, answer: str) -> float:
    """Takes whatever goes wrong for a wrong answer."""
    try:
        [said] = ask("judge", [{"role": "user", "content": response}])
        return float(said.text == "yes")
    except ServedModelError:
        return 0.25  # of a response that is too long for the judge
    except Exception:
        return 0.0


def of_nobody(prompt: str, response: str, answer: str) -> float:
    return float(ask("umpire", [{"role": "user", "content": response}])[0].text == "yes")


def longest_is_praised(prompt, answer, answers):
    """A term of a group, which the judge names."""
    [said] = ask("judge", [{"role": "user", "content": " ".join(one.response for one in answers)}])
    return {"praise": [float(one.response == said.text) for one in answers]}
