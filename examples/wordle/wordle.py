"""Wordle as a workflow: the model guesses a word of five letters, and is told which letters are right."""

import re

from areal_megatron.workflows.episode import Episode

PROMPT = (
    "Let us play Wordle. Guess my word of five letters; you have six guesses. After each guess I write a mark below "
    "every letter: G where the letter is right, Y where the word has it elsewhere, - where the word does not have it. "
    "Think briefly, and end each answer with your guess in brackets, such as [crane]."
)


def guess_of(answer: str) -> str | None:
    """Returns the last word in brackets, or None without one."""
    found = re.findall(r"\[([a-z]{5})\]", answer.lower())
    return found[-1] if found else None


def marks(guess: str, word: str) -> str:
    """Returns a mark for each letter: G in its place, Y elsewhere, - not in the word.

    A letter that the guess has more often than the word gets so many G and Y as the word has, G first.
    """
    left = [letter for letter, own in zip(word, guess, strict=True) if letter != own]
    found = ""
    for letter, own in zip(word, guess, strict=True):
        if own == letter:
            found += "G"
        elif own in left:
            left.remove(own)
            found += "Y"
        else:
            found += "-"
    return found


async def play(episode: Episode) -> float:
    """Returns 1 for the word at once, a tenth less for each further guess, and 0 without it."""
    word = episode.prompt.answer
    for turn in range(episode.turns):
        guess = guess_of(await episode.sample())
        if guess == word:
            return 1 - turn / 10
        if turn + 1 < episode.turns:
            episode.say(
                "Please end with a guess such as [crane]." if guess is None else f"{guess}\n{marks(guess, word)}"
            )
    return 0.0
